"""CUDA tensors on a machine without a GPU, for builds of torch with CUDA: they need no driver here.

    with fake_gpu() as gpu:
        torch.zeros(3, device="cuda").sum().item()
    gpu.waits  # of the host for the device, by line of ours

Every CUDA tensor is a FakeTensor with a real CPU tensor beside it, and every operator runs on both:
the fake ones raise where devices are mixed, the real ones answer what the host reads. Streams,
events and cuDNN's LSTM have stand-ins. NCCL is gloo's work on the real tensors.
"""

import sys
import threading
import types
import warnings
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(f"{ROOT / name}/" for name in ("agents", "envs", "rl_dist"))
GIB = 2**30
aten = torch.ops.aten
READS = {  # the host needs their result, or its size
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default),
    *(aten.masked_select.default, aten.repeat_interleave.Tensor, aten.bincount.default),
}
COPIES = {aten._to_copy.default, aten.copy_.default}
ORIGINAL_ENGINE = torch.autograd.Variable._execution_engine
NO_WORK = {aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default}
NO_WORK |= {aten.new_empty.default, aten.new_empty_strided.default, aten.lift_fresh.default}
NO_WORK |= {aten._unsafe_view.default, aten.detach.default}


def _is_cuda(value):
    return isinstance(value, torch.device) and value.type == "cuda"


def _lstm_cell(igates, hgates, cell, bias_ih=None, bias_hh=None):
    """The fused kernel of CUDA, in plain operators."""
    gates = igates + hgates
    gates = gates if bias_ih is None else gates + bias_ih + bias_hh
    into, forget, new, out = gates.chunk(4, 1)
    after = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
    return out.sigmoid() * after.tanh(), after, gates


CPU_KERNELS = {aten._thnn_fused_lstm_cell.default: _lstm_cell}  # of what only CUDA has


class FakeGpu(TorchDispatchMode):
    """Runs operators on both halves, and counts.

    Attributes:
        operators: Counter of (phase, line of ours); views and allocations are not counted.
        waits: Counter of (phase, line of ours, reason).
    """

    def __init__(self, num_gpus=1, phases=None):
        super().__init__()
        self.num_gpus = num_gpus
        self.phases = phases or {}  # a name for what is done inside functions, by (file, function)
        self.operators, self.waits = Counter(), Counter()
        self.on_wait = "default"  # of set_sync_debug_mode
        self.current = 0  # device
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE):
            return func(*args, **kwargs)  # DTensor asks for shapes alone
        known = (FakeTensor, torch.nn.Parameter)
        if any(kind is not torch.Tensor and not issubclass(kind, known) for kind in types):
            return NotImplemented  # a DTensor, which comes back with its parts
        leaves = tree_leaves((args, kwargs))
        if not any(isinstance(leaf, FakeTensor) or _is_cuda(leaf) for leaf in leaves):
            return func(*args, **kwargs)
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            with self:  # operators that are made of others
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        self._count(func, leaves, kwargs)
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        try:
            fake = self._fakes.__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            fake = None
        real_args, real_kwargs = tree_map(self.real, (args, kwargs))
        real = CPU_KERNELS.get(func, func)(*real_args, **real_kwargs)
        if fake is None:
            place = next(leaf.device for leaf in leaves if isinstance(leaf, FakeTensor))
            return tree_map(lambda part: self.on_gpu(part, place), real)
        fakes, shape = tree_flatten(fake)
        pairs = zip(fakes, tree_leaves(real), strict=True)
        return tree_unflatten([self._pair(*pair) for pair in pairs], shape)

    @staticmethod
    def real(value):
        """The CPU's half of a value."""
        if isinstance(value, FakeTensor):
            return value.real_half
        return torch.device("cpu") if _is_cuda(value) else value

    def on_gpu(self, real, place):
        """A CUDA tensor beside a CPU tensor; anything else stays."""
        if not isinstance(real, torch.Tensor):
            return real
        with _disable_current_modes(), self._fakes:
            fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=place)
        return self._pair(fake, real)

    @staticmethod
    def _pair(fake, real):
        if not isinstance(fake, FakeTensor) or fake.device.type == "cpu":
            return real
        if fake.shape != real.shape:
            raise AssertionError(f"shape {list(fake.shape)} on CUDA, {list(real.shape)} on the CPU")
        if not hasattr(fake, "real_half"):  # else it was changed in place
            fake.real_half = real
        return fake

    def _collective(self, func, args, kwargs):
        """Let gloo do it between the real tensors."""
        given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, FakeTensor)]
        fakes = {id(leaf.real_half): leaf for leaf in given}
        out = func(*tree_map(self.real, args), **tree_map(self.real, kwargs))
        return tree_map(lambda part: fakes.get(id(part), part), out)

    def _count(self, func, leaves, kwargs):
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
        masks = (torch.bool, torch.uint8)
        reason = ""
        if func in READS:
            reason = func.overloadpacket.__name__.strip("_")
        elif func in COPIES and not kwargs.get("non_blocking"):
            places = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
            goal = kwargs.get("device") or next(iter(leaves)).device
            reason = f"copy to {goal.type}" if places | {goal.type} == {"cpu", "cuda"} else ""
        elif "index" in func.name() and any(leaf.dtype in masks for leaf in tensors[1:2]):
            reason = "index by a mask"
        elif "index" in func.name() and any(leaf.device.type == "cpu" for leaf in tensors):
            reason = "index from the host"
        if reason:
            self.wait(reason)
        if not (func.is_view or func in NO_WORK):
            self.operators[self._place()] += 1

    def wait(self, reason):
        """Count a wait of the host for the device."""
        if self.on_wait == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {reason}")
        if self.on_wait == "warn":
            warnings.warn(f"called a synchronizing CUDA operation: {reason}", stacklevel=2)
        self.waits[(*self._place(), reason)] += 1

    def launched(self):
        """Count the operator of a stand-in."""
        self.operators[self._place()] += 1

    def _place(self):
        """The phase, and the innermost line of ours."""
        frame, line = sys._getframe(1), ""
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(OURS):
                name = Path(code.co_filename).relative_to(ROOT).as_posix()
                line = line or f"{name}:{frame.f_lineno} {code.co_name}"
                if phase := self.phases.get((name, code.co_name)):
                    return phase, line
            frame = frame.f_back
        return "elsewhere", line


class FakeLSTM(torch.autograd.Function):
    """cuDNN's LSTM: one operator forward and one backward."""

    @staticmethod
    def forward(ctx, gpu, *tensors):
        gpu.launched()
        assert {tensor.device for tensor in tensors} == {tensors[0].device}, "devices are mixed"
        ctx.gpu, ctx.place = gpu, tensors[0].device
        # torch enters here with its modes on and its gradients off
        kind = tensors[0].dtype
        wide = torch.promote_types(kind, torch.float32)  # not every CPU has an LSTM of bf16
        with _disable_current_modes(), torch.enable_grad():
            ctx.inputs = [gpu.real(tensor).detach().requires_grad_() for tensor in tensors]
            inputs, hidden, cell, *weights = (tensor.to(wide) for tensor in ctx.inputs)
            options = (True, 1, 0.0, False, False, False)
            outputs = torch._VF.lstm(inputs, (hidden, cell), weights, *options)
            ctx.outputs = [output.to(kind) for output in outputs]
        return tuple(gpu.on_gpu(output.detach(), ctx.place) for output in ctx.outputs)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.gpu.launched()
        with _disable_current_modes():
            given = [ctx.gpu.real(gradient) for gradient in gradients]
            found = torch.autograd.grad(ctx.outputs, ctx.inputs, given)
        return None, *(ctx.gpu.on_gpu(gradient, ctx.place) for gradient in found)


class Engine:
    """The backward pass in this thread: torch's own asks the driver for its streams."""

    def __init__(self):
        self.hooks = {}  # of tensors, by node and number of its output
        self.callbacks = []

    def queue_callback(self, callback):
        self.callbacks.append(callback)

    def register_hook(self, tensor, hook):
        self.hooks.setdefault((tensor.grad_fn, tensor.output_nr), []).append(hook)

    def run_backward(self, tensors, gradients, *args, **options):
        if isinstance(tensors[0], FakeTensor):
            return self._backward(tensors[0].grad_fn, gradients[0])
        return ORIGINAL_ENGINE.run_backward(tensors, gradients, *args, **options)

    @torch.no_grad()
    def _backward(self, root, gradient):
        waiting = Counter()  # edges that have yet to bring a gradient, by node
        found, todo = {root}, [root]
        while todo:
            for after, _ in todo.pop().next_functions:
                if after is not None:
                    waiting[after] += 1
                    todo += [after] if after not in found else []
                    found.add(after)
        gradients = {root: {0: gradient}}
        ready = [root]
        while ready:
            node = ready.pop()
            results = self._apply(node, gradients.pop(node, {}))
            for (after, number), result in zip(node.next_functions, results, strict=False):
                if after is None:
                    continue
                if result is not None:
                    own = gradients.setdefault(after, {})
                    result = self._checked(after._input_metadata[number], result)
                    own[number] = own[number] + result if number in own else result
                waiting[after] -= 1
                ready += [after] if not waiting[after] else []
        while self.callbacks:
            self.callbacks.pop(0)()
        self.hooks.clear()

    def _apply(self, node, gradients):
        given = []
        for number, meta in enumerate(node._input_metadata):
            gradient = gradients.get(number)
            for hook in self.hooks.get((node, number), []) if gradient is not None else []:
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            if gradient is None and hasattr(node, "apply"):  # a Function of Python
                gradient = torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
            given.append(gradient)
        if all(gradient is None for gradient in given):
            return [None] * len(node.next_functions)
        results = node.apply(*given) if hasattr(node, "apply") else node(*given)
        results = results if isinstance(results, tuple) else (results,)
        # a Function's arguments that are no tensors come first, and have no edge
        return results[len(results) - len(node.next_functions) :]

    @staticmethod
    def _checked(meta, gradient):
        assert gradient.device == meta.device, f"gradient on {gradient.device}, not {meta.device}"
        if gradient.shape != meta.shape:
            gradient = gradient.sum_to_size(meta.shape)
        return gradient.to(meta.dtype)


class FakeStream:
    """A stream whose work is done at once."""

    stream_id, device_index, device_type = 0, 0, 1  # as torch counts streams and kinds of devices

    def __init__(self, *args, **kwargs):
        self.device = torch.device("cuda", 0)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def record_event(self, event=None):
        return event or FakeEvent()

    def wait_event(self, event):
        pass

    wait_stream = wait_event

    def is_capturing(self):
        return False


class FakeEvent:
    """An event that has happened."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None):
        pass

    wait = record

    def query(self):
        return True

    def elapsed_time(self, other):
        return 1.0


class Inline(threading.Thread):
    """A thread whose work is done when it starts."""

    def start(self):
        self.run()

    def join(self, timeout=None):
        pass


@contextmanager
def fake_gpu(num_gpus=1, phases=None):
    """Run what is inside on GPUs that are not there; gives the FakeGpu that counts."""
    gpu = FakeGpu(num_gpus, phases)
    with gpu._fakes:  # which puts a device guard in place that asks no driver
        pass
    with ExitStack() as patches:
        patches.callback(torch._C._set_only_lift_cpu_tensors, False)
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") copies
        for owner, names in stand_ins(gpu).items():
            for name, value in names.items():
                patches.enter_context(mock.patch.object(owner, name, value))
        threads = types.SimpleNamespace(Thread=Inline, Lock=threading.Lock)
        parallel = torch.nn.parallel.parallel_apply.__globals__
        patches.enter_context(mock.patch.dict(parallel, threading=threads))
        patches.enter_context(gpu)
        yield gpu


def stand_ins(gpu):
    """What takes the place of functions that ask a driver, by owner and name."""
    original_lstm, original_init = torch._VF.lstm, dist.init_process_group
    engine = Engine()

    def synchronize(*args):
        gpu.wait("synchronize")

    def lstm(inputs, state, weights, *options):
        if not isinstance(inputs, FakeTensor):
            return original_lstm(inputs, state, weights, *options)
        tensors = [inputs, *state, *weights]
        if torch.is_autocast_enabled("cuda"):
            tensors = [tensor.to(torch.get_autocast_dtype("cuda")) for tensor in tensors]
        return FakeLSTM.apply(gpu, *tensors)

    def init_process_group(backend, device_id=None, **options):
        return original_init("gloo" if backend == "nccl" else backend, **options)

    def scatter(tensor, devices=None, chunk_sizes=None, dim=0, streams=None):
        parts = tensor.split(chunk_sizes, dim) if chunk_sizes else tensor.chunk(len(devices), dim)
        return tuple(part.to(f"cuda:{i}") for part, i in zip(parts, devices, strict=False))

    def gather(tensors, dim=0, destination=None):
        return torch.cat([tensor.to(f"cuda:{destination or 0}") for tensor in tensors], dim)

    def broadcast_coalesced(tensors, devices):
        return [[tensor.to(f"cuda:{i}") for tensor in tensors] for i in devices]

    def reduce_add_coalesced(inputs, destination=None):
        moved = ([part.to(f"cuda:{destination or 0}") for part in parts] for parts in inputs)
        return tuple(sum(parts) for parts in zip(*moved, strict=True))

    def stream(*args):
        found = FakeStream()
        found.synchronize = synchronize
        return found

    def set_device(device):
        gpu.current = torch.device(device).index

    alike = {"total_memory": 80 * GIB, "multi_processor_count": 100}
    properties = types.SimpleNamespace(name="no GPU", major=9, minor=0, **alike)

    def properties_of(device=None):
        index = gpu.current if device is None else torch.device(device).index
        return types.SimpleNamespace(**vars(properties), uuid=f"GPU-{index}")

    cuda = {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: gpu.num_gpus,
        "set_device": set_device,
        "current_device": lambda: gpu.current,
        "get_device_capability": lambda *args: (9, 0),
        "get_device_name": lambda *args: properties.name,
        "get_device_properties": properties_of,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda *args: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *args: None,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *args: True,
        "set_sync_debug_mode": lambda mode: setattr(gpu, "on_wait", mode),
        "synchronize": synchronize,
        "current_stream": stream,
        "Stream": FakeStream,
        "Event": FakeEvent,
        "stream": lambda *args: nullcontext(),
        "device": lambda *args: nullcontext(),
    }
    accelerator = {
        "is_available": lambda: True,
        "current_accelerator": lambda *args, **kwargs: torch.device("cuda"),
        "current_stream": stream,
        "device_index": lambda *args: nullcontext(),
    }
    comm = {"scatter": scatter, "gather": gather, "broadcast_coalesced": broadcast_coalesced}
    comm |= {"reduce_add_coalesced": reduce_add_coalesced}
    foreach = torch.utils._foreach_utils
    return {
        torch.cuda: cuda,
        torch.accelerator: accelerator,
        torch.nn.parallel.comm: comm,
        torch._VF: {"lstm": lstm},
        torch.nn.LSTM: {"flatten_parameters": lambda module: None},
        FakeTensor: {
            "tolist": lambda tensor: tensor.cpu().tolist(),
            "__reduce_ex__": lambda tensor, protocol: tensor.real_half.__reduce_ex__(protocol),
        },
        foreach: {"_foreach_supported_types": [*foreach._foreach_supported_types, FakeTensor]},
        torch.Tensor: {
            "register_hook": lambda tensor, hook: engine.register_hook(tensor, hook),
            "pin_memory": lambda tensor: tensor,
        },
        torch.autograd.Variable: {"_execution_engine": engine},
        FakeTensorMode: {"avoid_device_init": True},
        dist: {"init_process_group": init_process_group},
    }
