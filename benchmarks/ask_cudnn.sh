#!/usr/bin/env bash
# Run a command with cuDNN's own check of its calls, for programs compiled for a GPU that is not attached:
#
#     bash benchmarks/ask_cudnn.sh DIR python -m leanformer.cost --config=configs/vit_b_7x16.py --device=h100
#
# With a flag, XLA asks cuDNN for an execution plan of each call. It needs cuDNN (9.23.2.1: 9.28 is refused in this mode),
# the libraries that cuDNN loads, and a driver. The libraries are installed into DIR (2.1 GB), which should hold nothing
# else. The driver is a stub compiled by gcc that has a version and no device. If cuDNN rejects a call, the command ends
# with the reason. Needs the extra gpu-compile.
set -euo pipefail
(($# > 1)) || { echo "usage: $0 DIR COMMAND..." >&2; exit 2; }
mkdir -p "$1"
dir=$(cd "$1" && pwd)
shift

[ -d "$dir/nvidia/cudnn" ] || "${PYTHON:-python}" -m pip install --quiet --no-deps --target "$dir" \
  nvidia-cudnn-cu12==9.23.2.1 nvidia-cublas-cu12==12.9.3.13 nvidia-cuda-nvrtc-cu12==12.9.86
touch "$dir/nvidia/__init__.py"  # a regular package precedes jax[cuda12]'s namespace package on the path

# Calls that need a device return "no device" (100). Loading a kernel that cuDNN has compiled succeeds, so that cuDNN
# finishes the plan and reports its workspace.
{
  for name in cuInit cuDeviceGet cuDeviceGetCount cuCtxGetCurrent cuCtxGetLimit cuCtxPopCurrent cuCtxPushCurrent \
    cuStreamGetCtx cuLinkCreate cuLinkAddData cuLinkComplete cuLinkDestroy cuLaunchKernel cuLaunchKernelEx \
    cuLaunchCooperativeKernel cuTensorMapEncodeTiled cuTensorMapEncodeIm2col cuOccupancyMaxPotentialClusterSize; do
    echo "int $name(void) { return 100; }"
  done
  for name in cuLibraryUnload cuModuleUnload cuKernelSetAttribute; do
    echo "int $name(void) { return 0; }"
  done
  for name in cuLibraryLoadData cuLibraryLoadFromFile cuLibraryGetKernel cuModuleLoadData cuModuleGetFunction; do
    echo "int $name(void **handle) { *handle = (void *)16; return 0; }"
  done
  echo 'int cuKernelGetAttribute(int *value) { *value = 0; return 0; }'
  echo 'int cuDriverGetVersion(int *version) { *version = 13000; return 0; }'
  echo 'int cuGetErrorName(int error, const char **text) { *text = "no driver"; return 0; }'
  echo 'int cuGetErrorString(int error, const char **text) { *text = "stub driver: no device"; return 0; }'
} | gcc -shared -fPIC -x c -o "$dir/libcuda.so.1" -

lib=$dir/nvidia
export LD_LIBRARY_PATH=$dir:$lib/cudnn/lib:$lib/cublas/lib:$lib/cuda_nvrtc/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$dir
export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_cudnn_deviceless_compilation_mode=CUDNN_DEVICELESS_COMPILATION_ALWAYS"
exec "$@"
