#!/bin/bash
# A recipe on the machines of a Slurm job; run from the project's folder, which all machines share:
#   sbatch --nodes=2 [--gpus-per-node=8] [--time=8:00:00] slurm/job.sh RECIPE [flags of cookbook launch]
# Two minutes before its time is up the run saves and stops, and the job queues again and resumes. A step and a save
# must take less: --signal=B:USR1@600 leaves ten.
# A sweep, whose task N adds the words of line N of a file, such as --set seed=1 --set run.output_dir=outputs/seed1,
# without quotes:
#   SWEEP=sweep.txt sbatch --array=1-8 slurm/job.sh RECIPE
# cookbook sweep --to slurm writes such a script, which has the words of each task.
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

export COOKBOOK_STEP_FILE=$PWD/slurm-$SLURM_JOB_ID.step # the step after which the run stopped
before=$(cat "$COOKBOOK_STEP_FILE" 2>/dev/null || echo 0)

words=()
if [ "$SLURM_ARRAY_TASK_ID" ] && [ "$SWEEP" != - ]; then
  read -ra words <<<"$(sed -n "${SLURM_ARRAY_TASK_ID}p" "${SWEEP:-/dev/null}" | tr -d '\r')"
  if [ ${#words[@]} = 0 ]; then
    echo "task $SLURM_ARRAY_TASK_ID of an array: SWEEP=$SWEEP has no such line, with what is different in it" >&2
    exit 2
  fi
fi

# A machine that fails ends the others by the lost connection; srun waits for them, so that its exit code is the run's.
srun --kill-on-bad-exit=0 --wait=60 --cpu-bind=none .venv/bin/python -m cookbook launch "$@" "${words[@]}" \
  ${SLURM_RESTART_COUNT:+--set run.resume=auto} &
srun=$! asked=''
trap 'asked=yes; kill -USR1 $srun' USR1 # srun passes it on to every machine
while kill -0 $srun 2>/dev/null; do wait $srun; done # the signal ends a wait
wait $srun
code=$?

after=$(cat "$COOKBOOK_STEP_FILE" 2>/dev/null || echo 0)
if [ "$asked" ] && [ $code = 75 ]; then
  if [ "$after" != "$before" ]; then
    echo "stopped after step $after; the job queues again"
    exec scontrol requeue "$SLURM_JOB_ID"
  fi
  echo "no step was made since step $before, so the job does not queue again; give it more --time" >&2
fi
rm -f "$COOKBOOK_STEP_FILE"
exit $code
