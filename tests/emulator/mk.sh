cd ${EMU:?}
F="-std=c++20 -O1 -fPIC -fvisibility=hidden -w -ffp-contract=off -fno-strict-aliasing -DANYFLASH_CUDA_HAS_GROUPS -DANYFLASH_HAS_CUDA -I${EMU:?}/inc -Isrc -I${TREE:?}/include -isystem /usr/local/cuda/include"
mkdir -p o
if [ $# = 0 ]; then set -- $(cd src/cuda; ls *.cpp */*.cpp */*.cu | grep -v float16); set -- "$@" ; fi
for f in "$@"; do
 o=o/$(echo $f | tr '/.' '__').o
 if [[ $f == *.cu ]]; then nice -n 19 g++ $F -x c++ -include emu.h -c src/cuda/$f -o $o || echo FAIL $f; else nice -n 19 g++ $F -include emu.h -c src/cuda/$f -o $o || echo FAIL $f; fi
done
