# Shared by bench/compare and its like, which have sourced scripts/common.sh: the environment with the peers (or, where
# $framework names one, the one with that framework),
# anyflash in it, the C++ benchmarks. Afterwards $python is its interpreter, and the folder the caller's.
packages "${build_packages[@]}" libbenchmark-dev libcli11-dev nlohmann-json3-dev libzip-dev libpng-dev pkg-config
if [[ -v framework ]]; then
  framework_environment "$framework"
else
  folder=.venv-bench
  environment "$folder" bench/requirements.txt
fi
install_anyflash "$folder"
say "the C++ benchmarks"
cmake -S . -B build-bench -G Ninja -DCMAKE_BUILD_TYPE=Release -DANYFLASH_BENCH=ON -DANYFLASH_CLI=OFF -DANYFLASH_CUDA=OFF >/dev/null
cmake --build build-bench --target bench_calls bench_kernels
cd "$caller"
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184  # freed memory is kept: no timed call pays for new pages
