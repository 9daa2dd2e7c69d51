"""Fake GPUs in torch, for tests on machines without a GPU."""

from types import SimpleNamespace

GIB = 2**30
CARD = SimpleNamespace(name="Fake 9000", major=9, minor=0, total_memory=80 * GIB)
HELD = {  # memory statistics of torch's allocator
    "allocated_bytes.all.current": 2 * GIB,
    "reserved_bytes.all.current": 3 * GIB,
    "allocated_bytes.all.peak": 4 * GIB,
}


def pretend_gpus(monkeypatch, count=2, **answers):
    """Replace functions of torch.cuda by fakes that return fixed values.

    `answers` maps function names to return values. A list has one value for each GPU. If a value
    is an exception, the fake raises it.
    """
    answers = {
        "utilization": 50,
        "temperature": 60,
        "power_draw": 250_500,
        "device_memory_used": 30 * GIB,
        "get_device_properties": CARD,
        "get_device_name": CARD.name,
        "memory_stats": HELD,
        "mem_get_info": (7 * GIB, 80 * GIB),
        "device_count": count,
        "is_available": count > 0,
        "is_initialized": True,
        "init": None,
        "nccl.version": (2, 29, 3),
    } | answers

    def answering(value):
        def answer(index=0, *_):
            chosen = value[index] if isinstance(value, list) else value
            if isinstance(chosen, Exception):
                raise chosen
            return chosen

        return answer

    for name, value in answers.items():
        monkeypatch.setattr(f"torch.cuda.{name}", answering(value))
