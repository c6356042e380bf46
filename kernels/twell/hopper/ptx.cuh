// The PTX instructions that the kernels use, one function each. No headers: NVRTC has none to read.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// A CUtensorMap: opaque to us. Kernel parameters must hold it 64-byte aligned.
struct alignas(64) TensorMap {
  char bytes[128];
};

__device__ __forceinline__ u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- mbarrier -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void mbar_init(u32 bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals));
}
__device__ __forceinline__ void mbar_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void mbar_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void mbar_arrive_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Arrive on the same barrier of another CTA of the cluster. Without an explicit .cluster scope on purpose: that form
// adds a device-wide fence, and what it releases here is only that wgmma has read a buffer, which wait_group ordered.
__device__ __forceinline__ void mbar_arrive_peer(u32 bar, u32 cta) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(bar),
      "r"(cta)
      : "memory");
}
__device__ __forceinline__ void mbar_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}

// ---- clusters -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  __syncwarp();  // aligned: all threads of a warp arrive together
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- TMA ------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void tma_load(u32 to, const TensorMap* map, u32 bar, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to),
      "l"(map), "r"(bar), "r"(column), "r"(row)
      : "memory");
}
// The same box to the same address of every CTA in `mask`; each one's own barrier counts the bytes.
__device__ __forceinline__ void tma_load_multicast(u32 to, const TensorMap* map, u32 bar, int column, int row,
                                                   u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(bar), "r"(column), "r"(row), "h"(mask)
      : "memory");
}

// A box from shared to global memory, without what lies outside of the matrix. By a thread that `fence_tma_store` and a
// barrier come before, after the writes to `from`.
__device__ __forceinline__ void tma_store(const TensorMap* map, u32 from, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];\n"
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(from), "r"(column), "r"(row)
      : "memory");
}
// Makes this thread's writes to shared memory visible to TMA.
__device__ __forceinline__ void fence_tma_store() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Waits until this thread's stores have read shared memory.
__device__ __forceinline__ void wait_tma_stores() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// ---- wgmma ----------------------------------------------------------------------------------------------------------

// Descriptor of a K-major operand with 64 columns of 16 bits, 128-byte swizzle: groups of 8 rows are 1024 bytes apart.
__device__ __forceinline__ u64 wgmma_operand(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// ---- programmatic dependent launch ----------------------------------------------------------------------------------

// The next kernel in the stream may start on SMs that this one leaves.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Waits until the kernels ahead have ended and their writes are visible.
__device__ __forceinline__ void wait_for_kernels_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- the rest -------------------------------------------------------------------------------------------------------

template <int REGISTERS>
__device__ __forceinline__ void registers_give() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void registers_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void store_matrix_x4(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
__device__ __forceinline__ uint4 load_shared(u32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_shared_8(u32 from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}
// Read-only data; stays in L1, where tokens that run side by side share weight rows.
__device__ __forceinline__ uint4 load_weights(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::evict_last.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
// Read-only data that is used once.
__device__ __forceinline__ uint4 load_once(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
__device__ __forceinline__ void store_once(void* to, uint4 v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
// Two bfloat16 in a word: `low` in bits 0..15.
__device__ __forceinline__ float low_half(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high_half(u32 v) { return __uint_as_float(v & 0xffff0000u); }
// Not zero if any of the 8 values is Inf or NaN.
__device__ __forceinline__ u32 exponent_is_full(uint4 v) {
  const u32 x = (v.x & 0x7f807f80u) + 0x00800080u, y = (v.y & 0x7f807f80u) + 0x00800080u;
  const u32 z = (v.z & 0x7f807f80u) + 0x00800080u, w = (v.w & 0x7f807f80u) + 0x00800080u;
  return (x | y | z | w) & 0x80008000u;
}
__device__ __forceinline__ u32 to_halves(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
// With ReLU. NaN stays NaN (0x7fff), and every result is >= 0 as a 16-bit integer.
__device__ __forceinline__ u32 to_relu_halves(float low, float high) {
  u32 v;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
