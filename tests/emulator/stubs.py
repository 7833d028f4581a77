import os
import sys
real=set(sys.argv[1:])
kinds={'portable/forward':('forward_kernel_%s','ForwardKernel','ForwardKind','cuda/portable/forward_kernels.h'),'portable/backward':('backward_kernels_%s','BackwardKernels','BackwardKind','cuda/portable/backward_kernels.h'),'portable/decode':('decode_kernels_%s','DecodeKernels','DecodeKind','cuda/portable/decode_kernels.h')}
o='#include <cstdlib>\n'
for h in ['cuda/portable/forward_kernels.h','cuda/portable/backward_kernels.h','cuda/portable/decode_kernels.h','cuda/hopper/forward_kernels.h','cuda/hopper/backward_kernels.h']: o+='#include "%s"\n'%h
o+='namespace anyflash::cuda {\n'
for k,(f,r,a,h) in kinds.items():
    for t in ['float16','bfloat16','float32','float64']:
        if k+'_'+t not in real: o+='%s %s(%s) { abort(); }\n'%(r,f%t,a)
for t in ['float16','bfloat16']:
    if 'hopper/forward_'+t not in real: o+='GroupForwardKernel group_forward_kernel_%s(int, bool) { abort(); }\n'%t
    if 'hopper/backward_'+t not in real: o+='GroupBackwardKernels group_backward_kernels_%s(int, ScoreKind) { abort(); }\n'%t
o+='}\n'
open(os.environ['EMU'] + '/stubs.cpp', 'w').write(o)
