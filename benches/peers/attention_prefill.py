"""Causal prefill by PyTorch's attention over contiguous keys: what `attention/prefill` is measured against.

Run on a GPU machine with PyTorch: `python3 attention_prefill.py`. Prints µs and TFLOP/s of causal FLOPs
(4 · batch · heads · dim · length² / 2), the median of replays between events, like the benches' harness.
"""

import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Q_HEADS, KV_HEADS = 32, 8


def timed(run, launches, replays=7):
    for _ in range(3):
        run()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(launches):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)


def main():
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    for batch, length, dim, launches in [
        (1, 4096, 128, 10),
        (8, 4096, 128, 4),
        (1, 32768, 128, 1),
        (32, 1024, 128, 10),
        (8, 4096, 64, 4),
    ]:
        def make(heads):
            return torch.randn(batch, heads, length, dim, device="cuda", dtype=torch.bfloat16)

        q, k, v = make(Q_HEADS), make(KV_HEADS), make(KV_HEADS)
        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            time.sleep(0.4)
            with sdpa_kernel(backend):
                us = timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), launches)
            flops = 2 * batch * Q_HEADS * dim * length**2
            print(f"{name:6} {batch:3} x {length:5} x {dim:3}: {us:9.1f} µs {flops / us / 1e6:6.0f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
