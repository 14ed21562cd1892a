"""A platform for verl's workers on a machine without an accelerator: device calls do nothing, and
gloo stands for NCCL.

Every process of a run loads it first (``VERL_USE_EXTERNAL_MODULES=helpers.verl.on_cpu,...``,
``VERL_PLATFORM=cpu``, ``VERL_ENGINE_DEVICE=cuda``)."""

from __future__ import annotations

import functools
import sys
from contextlib import nullcontext
from types import ModuleType

# verl takes a class from trl that newer releases do not have
sys.modules["trl"] = None  # type: ignore[assignment]

import verl.utils.distributed as distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry


class NoDevice(ModuleType):
    """In place of ``torch.cuda``: a name, no memory, and 0 for everything else."""

    answers = {"get_device_name": "CPU", "mem_get_info": (0, 0)}

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.answers.get(name, 0)


def _nothing(*args, **kwargs):
    return None


CPU = dict.fromkeys(PlatformBase.__abstractmethods__, _nothing) | {
    "device_name": "cpu",
    "vendor_name": "none",
    "device_module": NoDevice("no_device"),
    "is_available": lambda self: True,
    "current_device": lambda self: "cpu",
    "device_count": lambda self: 1,
    "get_device_capability": lambda self, device_index=0: (None, None),
    "communication_backend_name": lambda self: "gloo",
    "visible_devices_envvar": lambda self: "CUDA_VISIBLE_DEVICES",
    "nvtx_range": lambda self, msg: nullcontext(),
    "ray_resource_name": lambda self: "GPU",
    "ray_resource_options": lambda self, num_gpus: {"num_gpus": num_gpus},
    "ray_noset_envvars": lambda self: [],
    "is_ipc_supported": lambda self: False,
}
PlatformRegistry.register(platform="cpu")(type("PlatformCPU", (PlatformBase,), CPU))
distributed.initialize_global_process_group_ray = functools.partial(
    distributed.initialize_global_process_group_ray, backend="gloo"
)
