// Teams of warps that keep one token's row of the hidden size in registers, and walk over weight rows.   sm_90a, bfloat16
//
// The hidden size K is cut into SLICES of at most 2048, one warp each; a token's work is dealt to PARTS such teams. A CTA
// takes `chunk` neighbouring tokens at a time from a shared counter; neighbours run together, so that weight rows that
// they share come from L1. With one part, tokens over LONG_TOKEN non-zeros wait until the CTA's other tokens are done;
// then all of its warps share them. WARPS, K and PARTS are macros.
#pragma once
#include "ptx.cuh"

constexpr int LONG_TOKEN = 192;
constexpr int SLICES = (K + 2047) / 2048, CHUNKS = (K + 256 * SLICES - 1) / (256 * SLICES), TEAMS = WARPS / SLICES;
constexpr int ROW_BYTES = K * 2;
static_assert(K % 64 == 0 && K <= 8192, "the hidden size must be a multiple of 64 up to 8192");
static_assert(WARPS % (SLICES * PARTS) == 0, "a CTA must hold a whole number of tokens");

struct Team {
  static constexpr int SUMS = PARTS == 1 ? 1 : TEAMS / PARTS;
  float dot[2][WARPS];
  alignas(16) float sum[SUMS][SLICES * CHUNKS * 256];  // of a token, on its way from part to part
  float sum_l1[SUMS];
  int token[2][WARPS];
  u64 chunk;  // tokens of the CTA's chunk that are not taken yet << 32 | its number
  int long_tokens;
};

// A warp's work: its slice of the hidden size, its part of the non-zeros, and its unit, that is which token.
template <int P>
struct WarpRole {
  int lane, warp, slice, part, unit;
  __device__ WarpRole()
      : lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        slice(warp % SLICES),
        part(warp / SLICES % P),
        unit(warp / (SLICES * P)) {}
  __device__ bool leads() const { return part == 0 && slice == 0 && lane == 0; }
  __device__ void sync_token() const {
    if constexpr (SLICES * P == WARPS)
      __syncthreads();
    else if constexpr (SLICES * P > 1)
      barrier_sync(1 + unit, SLICES * P * 32);
    else
      __syncwarp();
  }
  __device__ void sync_slices() const { barrier_sync(1 + WARPS / SLICES / P + unit * P + part, SLICES * 32); }
};

__device__ __forceinline__ int element(int slice, int chunk, int lane) {
  return (slice * CHUNKS + chunk) * 256 + lane * 8;
}
// Only the last chunk of a row can reach past its end; for the others this is decided at compile time.
__device__ __forceinline__ bool inside(int slice, int chunk, int lane) {
  return K % (256 * SLICES) == 0 || element(slice, chunk, lane) < K;
}

__device__ __forceinline__ void load_row(uint4 (&v)[CHUNKS], const char* row, int slice, int lane) {
#pragma unroll
  for (int j = 0; j < CHUNKS; j++)
    v[j] = inside(slice, j, lane) ? load_weights(row + element(slice, j, lane) * 2) : make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ float dot(const uint4 (&a)[CHUNKS], const uint4 (&b)[CHUNKS]) {
  float low = 0, high = 0;
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) {
    low = fmaf(low_half(a[j].x), low_half(b[j].x), low), high = fmaf(high_half(a[j].x), high_half(b[j].x), high);
    low = fmaf(low_half(a[j].y), low_half(b[j].y), low), high = fmaf(high_half(a[j].y), high_half(b[j].y), high);
    low = fmaf(low_half(a[j].z), low_half(b[j].z), low), high = fmaf(high_half(a[j].z), high_half(b[j].z), high);
    low = fmaf(low_half(a[j].w), low_half(b[j].w), low), high = fmaf(high_half(a[j].w), high_half(b[j].w), high);
  }
  return low + high;
}

__device__ __forceinline__ void add_scaled(float (&y)[CHUNKS * 8], float h, const uint4 (&v)[CHUNKS]) {
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) {
    float* to = y + 8 * j;
    to[0] = fmaf(h, low_half(v[j].x), to[0]), to[1] = fmaf(h, high_half(v[j].x), to[1]);
    to[2] = fmaf(h, low_half(v[j].y), to[2]), to[3] = fmaf(h, high_half(v[j].y), to[3]);
    to[4] = fmaf(h, low_half(v[j].z), to[4]), to[5] = fmaf(h, high_half(v[j].z), to[5]);
    to[6] = fmaf(h, low_half(v[j].w), to[6]), to[7] = fmaf(h, high_half(v[j].w), to[7]);
  }
}

// The sum over the warp and, for a row in several slices, over their warps.
template <int P>
__device__ __forceinline__ float total(float s, const WarpRole<P>& at, Team& sm, int& flip) {
#pragma unroll
  for (int d = 16; d; d /= 2) s += __shfl_xor_sync(~0u, s, d);
  if constexpr (SLICES > 1) {
    if (at.lane == 0) sm.dot[flip][at.warp] = s;
    at.sync_slices();
    s = 0;
#pragma unroll
    for (int i = 0; i < SLICES; i++) s += sm.dot[flip][at.warp - at.slice + i];
    flip ^= 1;
  }
  return s;
}

__device__ __forceinline__ bool any_nonfinite(const uint4 (&v)[CHUNKS]) {
  u32 seen = 0;
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) seen |= exponent_is_full(v[j]);
  return seen;
}

// 0 * Inf is NaN: with a nonfinite value, every product outside the pattern is NaN.
__device__ __forceinline__ void poison(float (&y)[CHUNKS * 8]) {
#pragma unroll
  for (int i = 0; i < CHUNKS * 8; i++) y[i] = __uint_as_float(0x7fffffff);
}

// Adds up the parts of a token in their order, so that the result does not depend on timing; the last part has the sums.
template <int P>
__device__ __forceinline__ void add_parts(float (&y)[CHUNKS * 8], float& l1, const WarpRole<P>& at, Team& sm) {
  if constexpr (P == 1) return;
  float4* sum = (float4*)sm.sum[at.unit] + (at.slice * CHUNKS * 2) * 32 + at.lane;
  for (int part = 0; part < P; part++) {
    if (at.part == part) {
#pragma unroll
      for (int i = 0; i < CHUNKS * 2; i++) {
        float4 v = make_float4(y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]);
        if (part > 0) {
          const float4 before = sum[32 * i];
          v = make_float4(v.x + before.x, v.y + before.y, v.z + before.z, v.w + before.w);
        }
        if (part < P - 1) sum[32 * i] = v;
        y[4 * i] = v.x, y[4 * i + 1] = v.y, y[4 * i + 2] = v.z, y[4 * i + 3] = v.w;
      }
      if (at.slice == 0 && at.lane == 0) sm.sum_l1[at.unit] = l1 = part > 0 ? l1 + sm.sum_l1[at.unit] : l1;
    }
    at.sync_token();
  }
}

__device__ __forceinline__ void store_row(char* row, const float (&y)[CHUNKS * 8], int slice, int lane) {
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) {
    const float* v = y + 8 * j;
    const uint4 out =
        make_uint4(to_halves(v[0], v[1]), to_halves(v[2], v[3]), to_halves(v[4], v[5]), to_halves(v[6], v[7]));
    if (inside(slice, j, lane)) store_once(row + element(slice, j, lane) * 2, out);
  }
}

// The next token of this unit. A CTA takes `chunk_size` neighbouring tokens at a time, and its units take them one by one.
// The unit that finds none left fetches the next chunk; units that come meanwhile wait for it.
template <int P>
__device__ __forceinline__ int next_token(u32* next_chunk, int chunk_size, int tokens, Team& sm, const WarpRole<P>& at,
                                          int& flip) {
  int token = 0;
  if (at.leads()) {
    u64 chunk;
    int left;
    while ((left = (int)((chunk = atomicAdd(&sm.chunk, -(1ull << 32))) >> 32)) < 0) __nanosleep(20);
    if (left == 0) {
      chunk = atomicAdd(next_chunk, 1), left = chunk_size;
      atomicExch(&sm.chunk, (u64)(chunk_size - 1) << 32 | chunk);
    }
    token = (int)min((long long)(u32)chunk * chunk_size + chunk_size - left, (long long)tokens);
  }
  if constexpr (SLICES * P == 1) return __shfl_sync(~0u, token, 0);
  flip ^= 1;
  if (at.leads()) sm.token[flip][at.unit] = token;
  at.sync_token();
  return sm.token[flip][at.unit];
}

// Every token once. Params: M, chunk, next_chunk (zero at the start), link (M: lists of long tokens) and nonzeros_of(row,
// lane); Token<P>: a constructor from (Params, Shared), `at` and run(row, non-zeros).
template <template <int> class Token, class Params, class Shared>
__device__ __forceinline__ void for_all_tokens(const Params& p, Shared& sm) {
  Team& team = sm.team;
  if (threadIdx.x == 0) team.chunk = 0, team.long_tokens = -1;
  __syncthreads();
  {
    Token<PARTS> token(p, sm);
    int flip = 0;
    while (true) {
      const int row = next_token(p.next_chunk, p.chunk, p.M, team, token.at, flip);
      if (row >= p.M) break;
      const int nonzeros = p.nonzeros_of(row, token.at.lane);
      if (PARTS == 1 && TEAMS > 1 && nonzeros > LONG_TOKEN) {
        if (token.at.leads()) p.link[row] = atomicExch(&team.long_tokens, row);
      } else {
        token.run(row, nonzeros);
      }
    }
  }
  if constexpr (PARTS == 1 && TEAMS > 1) {
    __syncthreads();
    Token<TEAMS> token(p, sm);
    for (int row = team.long_tokens; row >= 0; row = p.link[row]) token.run(row, p.nonzeros_of(row, token.at.lane));
  }
}
