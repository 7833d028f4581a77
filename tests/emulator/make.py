import os,re,shutil,subprocess,sys
src=os.environ['TREE']+'/src'; dst=os.environ['EMU']+'/src'
shutil.rmtree(dst,ignore_errors=True); shutil.copytree(src,dst)
R={'cuda/common/instructions.cuh':'instructions_emu.h','cuda/hopper/barriers.cuh':'barriers_emu.h','cuda/hopper/instructions.cuh':'hinstructions_emu.h','cuda/hopper/transposed_products.cuh':'tproducts_emu.h'}
for root,_,files in os.walk(dst+'/cuda'):
    for f in files:
        p=os.path.join(root,f); rel=os.path.relpath(p,dst)
        if rel in R:
            shutil.copy(os.environ['EMU']+'/inc/'+R[rel],p); continue
        s=open(p).read()
        s=s.replace('extern __shared__ __align__(1024) char memory[];','')
        s=re.sub(r'(?<!extern )__shared__ ','static ',s).replace('__noinline__','__attribute__((noinline))')
        s=re.sub(r'const __grid_constant__ (\w+) args',r'const \1& args',s)
        s=re.sub(r'(\b[\w:]+(?:<[^<>]*>)?)<<<([^;]*?), 0, stream>>>\((.*?)\);',lambda m:(lambda a: 'emu::launch_with([&] { %s(%s); }, %s, %s);'%(m[1],m[3],a[0],a[1]))(m[2].rsplit(', ',1)),s)
        s=re.sub(r'asm\("min\.NaN\.f32 %0, %0, 0f00000000;" : "\+f"\((\w+)\)\);',r'\1 = min_nan_zero(\1);',s)
        s=re.sub(r'if \(left_ > 8\) asm volatile\("prefetch.*\n','',s)
        s=re.sub(r'asm volatile\("" ::: "memory"\);.*','',s)
        s=s.replace('asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(high) : "f"(b), "f"(a));',
          'const auto sat = [](float x) { if (x != x) return x; return fabsf(x) > 3.3895313892515355e38f ? copysignf(3.3895313892515355e38f, x) : x; };\n  high = bfloat16_pair(sat(a), sat(b));')
        s=s.replace('__CUDA_ARCH_FEAT_SM90_ALL','__CUDA_ARCH_FEAT_SM90_ALL_EMU')
        s=s.replace('#if defined(__CUDACC__)','#if 1')
        open(p,'w').write(s)
# portable kernels must choose by what the host asks: all tilings are offered
for p in ['cuda/portable/forward_kernels.cuh','cuda/portable/backward_kernels.cuh','cuda/portable/decode_kernels.cuh']:
    s=open(dst+'/'+p).read()
    s=s.replace('#elif defined(__CUDA_ARCH_FEAT_SM90_ALL_EMU)','#elif 0')
    open(dst+'/'+p,'w').write(s)
