"""How many thread-block clusters of each size are co-resident on this GPU, by shared memory per block.

python tools/cluster_counts.py --out docs/measurements/clusters.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from megadsl.build.nvcc import build_cubin
from megadsl.machine import DEFAULT_ARCH
from megadsl.types import KIB

SIZES = (1, 2, 4, 8, 16)
SMEM = (100 * KIB, 200 * KIB, 208 * KIB)
THREADS = 288
SOURCE = """
extern "C" __global__ void __launch_bounds__(288, 1) probe(int* out) {
  extern __shared__ int words[];
  words[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[blockIdx.x] = words[(threadIdx.x + 1) % blockDim.x];
}
"""


def checked(result: tuple[Any, ...]) -> Any:
    """The value of a driver call; raises RuntimeError with the driver's code when it failed."""
    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(str(code))
    return values[0] if values else None


def count(kernel: Any, size: int, smem: int, sms: int) -> int:
    """Largest number of clusters of ``size`` blocks with ``smem`` bytes each that run at once."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = sms // size * size, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
    config.sharedMemBytes = smem
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = size, 1, 1
    config.attrs, config.numAttrs = [attribute], 1
    return int(checked(driver.cuOccupancyMaxActiveClusters(kernel, config)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.zeros(1, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    cubin = build_cubin(SOURCE, DEFAULT_ARCH, [], {}).path
    module = checked(driver.cuModuleLoadData(cubin.read_bytes()))
    kernel = checked(driver.cuModuleGetFunction(module, b"probe"))
    attributes = driver.CUfunction_attribute
    checked(driver.cuFuncSetAttribute(kernel, attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, max(SMEM)))
    checked(driver.cuFuncSetAttribute(kernel, attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
    rows = [{"size": size, "smem": smem, "clusters": count(kernel, size, smem, sms)} for smem in SMEM for size in SIZES]
    for row in rows:
        used = row["clusters"] * row["size"]
        print(f"{row['smem'] // KIB:>4} KB per block, clusters of {row['size']:>2}: {row['clusters']:>3} ({used} of {sms} SMs)")
    if args.out:
        args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "sms": sms, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
