"""`accelerate launch` of one process dies of SIGTERM without telling its program, which goes on alone.

python 07_accelerate_launch_sigterm.py
"""

import os
import signal
import subprocess
import sys
import time

if sys.argv[1:] == ["program"]:
    signal.signal(signal.SIGTERM, lambda *_: (print("the program got SIGTERM", flush=True), sys.exit(0)))
    print(os.getpid(), flush=True)
    time.sleep(20)
    sys.exit(0)

for processes, kind in (("1", "--cpu"), ("2", "--multi_gpu")):  # the latter starts torchrun, also without GPUs
    flags = [kind, "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    flags += ["--num_processes", processes, "--main_process_port", "0"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags, __file__, "program"]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    program = int(launcher.stdout.readline())
    launcher.send_signal(signal.SIGTERM)
    launcher.wait()
    time.sleep(2)
    try:
        os.kill(program, 0)
        state = "still runs"
        os.kill(program, signal.SIGKILL)
    except ProcessLookupError:
        state = "has ended"
    print(f"--num_processes {processes}: the launcher ended with {launcher.returncode}, its program {state}")
