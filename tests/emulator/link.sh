cd ${EMU:?}
python3 stubs.py $(ls o | grep -E "_(float32|float64|bfloat16|float16)_cu.o" | sed -E 's/_cu.o//; s/^(portable|hopper)_/\1\//')
G="-std=c++20 -O1 -fPIC -fvisibility=hidden -w -DANYFLASH_CUDA_HAS_GROUPS -DANYFLASH_HAS_CUDA -I${EMU:?}/inc -Isrc -I${TREE:?}/include -isystem /usr/local/cuda/include"
g++ $G -c stubs.cpp -o stubs.o && g++ $G -c src/backends.cpp -o backends.o && g++ $G -O2 -c emu.cpp -o emu.o || exit 1
rm -rf ar; mkdir ar; cd ar; ar x ${BUILD:?}/libanyflash.a; rm -f backends.cpp.o; cd ..
rm -f o/emu.o
B=${BUILD:?}/python
mkdir -p pkg; cp -r ${VENV:?}/lib/python3.11/site-packages/anyflash pkg/ 2>/dev/null; rm -f pkg/anyflash/_core*.so; rm -rf pkg/anyflash/tensorflow/lib*
g++ -shared -o pkg/anyflash/_core.cpython-311-x86_64-linux-gnu.so $B/CMakeFiles/anyflash_python.dir/src/*.o $(find $B/CMakeFiles/nanobind-static.dir -name "*.o") stubs.o backends.o emu.o o/*.o ar/*.o -Wl,--exclude-libs,ALL -lgomp -lpthread 2>&1 | grep -E "undefined|relocation|multiple" | sort | uniq -c | sort -rn | head -20
ls -la pkg/anyflash/_core*
