// Hot neurons, their backward: dh gets the gradient of the L1 term, then du = dh * g, dg = dh * u where g > 0.
//                                                                                                      sm_90a, bfloat16
//   dh, h = g * u: (M, H)     activated: (M, 2H), g and then u     d: (M, 2H), dg and then du
//   Without a gate (GATED = 0): activated is g, (M, H); d: (M, H), du = dh where g > 0.
//   SQUARED: g^2 in place of g, and dg, or without a gate du, times 2 g.
//
// A warp takes a row, eight columns a lane at a time.
// Macros: hot_steps.py's `macros`.
#include "ptx.cuh"

struct Params {
  const char *dh, *activated;
  char *d, *h;             // h: GATED or SQUARED only
  const float* dl1;        // may be null
  const float* l1_weight;  // (H), WEIGHTED only
  int M, H;
};
#include "params_check.cuh"  // made by compiler.py from params.py: offsets and sizes are those of the Python side

__device__ __forceinline__ float sign(float v) { return v > 0 ? 1.f : v < 0 ? -1.f : 0.f; }  // of NaN 0, as in torch

// What one element of dh, g and u gives.
struct Element {
  float h, du, dg;
  __device__ Element(float dh, float g, float u, float per_token) {
    const float a = SQUARED ? g * g : g, slope = SQUARED ? 2 * g : 1;
    h = GATED ? a * u : a;
    dh += per_token ? per_token * sign(h) : 0;
    du = GATED ? dh * a : g <= 0 ? 0 : dh * slope;
    dg = g <= 0 ? 0 : dh * u * slope;
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32) hot_backward(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % 32, row = blockIdx.x * WARPS + threadIdx.x / 32;
  if (row >= p.M) return;
  const float per_token = p.dl1 ? *p.dl1 / p.M : 0;
  const u64 own = (u64)row * p.H * 2, both = own * (GATED ? 2 : 1);
  for (int c = lane * 8; c < p.H; c += 256) {
    const int up_at = (p.H + c) * 2;
    const uint4 dh = load_once(p.dh + own + c * 2), gate = load_once(p.activated + both + c * 2);
    const uint4 up = GATED ? load_once(p.activated + both + up_at) : make_uint4(0, 0, 0, 0);
    const u32 dhs[4] = {dh.x, dh.y, dh.z, dh.w}, gs[4] = {gate.x, gate.y, gate.z, gate.w},
              us[4] = {up.x, up.y, up.z, up.w};
    u32 h[4], du[4], dg[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float l1_low = WEIGHTED ? per_token * p.l1_weight[c + 2 * i] : per_token;
      const float l1_high = WEIGHTED ? per_token * p.l1_weight[c + 2 * i + 1] : per_token;
      const Element low(low_half(dhs[i]), low_half(gs[i]), low_half(us[i]), l1_low);
      const Element high(high_half(dhs[i]), high_half(gs[i]), high_half(us[i]), l1_high);
      h[i] = to_halves(low.h, high.h), du[i] = to_halves(low.du, high.du), dg[i] = to_halves(low.dg, high.dg);
    }
    *(uint4*)(p.d + both + (GATED ? up_at : c * 2)) = make_uint4(du[0], du[1], du[2], du[3]);
    if constexpr (GATED) *(uint4*)(p.d + both + c * 2) = make_uint4(dg[0], dg[1], dg[2], dg[3]);
    if constexpr (GATED || SQUARED) *(uint4*)(p.h + own + c * 2) = make_uint4(h[0], h[1], h[2], h[3]);
  }
}
