"""A loss scaler unscales gradients of the host with a scale that has not arrived there. Needs a GPU.

python 12_torch_scaler_of_offloaded_gradients.py
"""

import torch

# As FSDP2 leaves it with CPUOffloadPolicy: weight, gradient and optimizer lie on the host, the loss on the GPU.
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=1.0)
scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
scaler.scale(weight.to("cuda").sum()).backward()
getattr(torch._C, "_cuda_sleep", int)(10**9)  # the GPU has something else to do first, for half a second
scaler.unscale_(optimizer)
print("gradient, which is 1:", weight.grad.tolist())
(found_inf,) = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
print("whether one was not finite, which is 0:", found_inf.item())
