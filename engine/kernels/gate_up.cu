// h = silu(x @ gate.T) * (x @ up.T), rounded once, over up to 256 rows of x, so that the weight passes once.
//
// A program multiplies all rows of x, TILES tiles of 64, by WIDTH / 2 rows of gate and the same of up. One thread loads
// pieces of 64 columns (TMA, 128-byte swizzle) into a ring of STAGES, GROUPS warpgroups multiply them (wgmma). The launch
// may begin before the one ahead of it has ended: the first pieces of the weight do not depend on it.
//
// Compiled in: TILES, GROUPS, WIDTH, STAGES.

#include "hopper.cuh"

constexpr int DEPTH = 64;  // columns of a piece: 128 bytes, as wide as the swizzle
constexpr int ROW_BYTES = DEPTH * 2;
constexpr int TILE_BYTES = 64 * ROW_BYTES;
constexpr int X_BYTES = TILES * TILE_BYTES, W_BYTES = WIDTH * ROW_BYTES, STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int GROUP_TILES = TILES / GROUPS;
constexpr int HALF = WIDTH / 2;
constexpr int LOADER = GROUPS * 128;  // the thread that loads, first of a warpgroup of its own
static_assert(TILES % GROUPS == 0 && HALF % 8 == 0 && TILES * 64 * HALF * 2 <= STAGES * STAGE_BYTES);

// Registers of a thread: as launched, and what a multiplying one gets of what the loading ones give back.
constexpr int LAUNCHED = 65536 / (GROUPS * 128 + 128) / 8 * 8;
constexpr int LOADING = 24, MULTIPLYING = (LAUNCHED + (LAUNCHED - LOADING) / GROUPS) / 8 * 8;

void store(const TensorMap& to, u32 from, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];\ncp.async.bulk.commit_group;" ::"l"(
            &to),
        "r"(from), "r"(column), "r"(row)
        : "memory");
}

// A matrix in shared memory to wgmma: rows of ROW_BYTES with a 128-byte swizzle, eight of them every 1024 bytes.
u64 matrix(u32 start) { return static_cast<u64>((start & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

/*MULTIPLY*/

float gated(float gate, float up) { return __fdividef(up * gate, 1.0f + __expf(-gate)); }

// x_map: bf16[rows, depth] in boxes of all rows (what lies behind them in the ring is multiplied, too, and not stored).
// weight_map: bf16[2 * inner, depth], [gate, up], in boxes of HALF rows. h_map: bf16[rows, inner], to store boxes of 64
// rows and HALF columns.
extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 128, 1)
    gate_up(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
            const __grid_constant__ TensorMap h_map, int rows, int inner, int depth) {
    extern __shared__ char memory[];
    const u32 ring = (in_shared(memory) + 1023) & ~1023u;
    const u32 full = ring + STAGES * STAGE_BYTES, empty = full + STAGES * 8;
    const int left = blockIdx.x * HALF, pieces = (depth + DEPTH - 1) / DEPTH;

    if (threadIdx.x == LOADER) {
        for (int stage = 0; stage < STAGES; ++stage) {
            expect_arrivals(full + stage * 8, 1);
            expect_arrivals(empty + stage * 8, GROUPS * 4);
        }
        barriers_are_set();
    }
    __syncthreads();

    if (threadIdx.x >= LOADER) {
        if (GROUPS > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADING));
        if (threadIdx.x > LOADER) return;
        const auto load_weight = [&](int piece) {
            const u32 barrier = full + piece % STAGES * 8, to = ring + piece % STAGES * STAGE_BYTES + X_BYTES;
            arrive_and_expect(barrier, rows * ROW_BYTES + W_BYTES);
            load(to, weight_map, barrier, piece * DEPTH, left);
            load(to + W_BYTES / 2, weight_map, barrier, piece * DEPTH, inner + left);
        };
        const auto load_x = [&](int piece) {
            load(ring + piece % STAGES * STAGE_BYTES, x_map, full + piece % STAGES * 8, piece * DEPTH, 0);
        };
        const int ahead = min(pieces, STAGES);
        for (int piece = 0; piece < ahead; ++piece) load_weight(piece);
        wait_for_launch_ahead();
        for (int piece = 0; piece < ahead; ++piece) load_x(piece);
        for (int piece = ahead; piece < pieces; ++piece) {
            wait_for(empty + piece % STAGES * 8, (piece / STAGES - 1) & 1);
            load_weight(piece);
            load_x(piece);
        }
        let_next_launch_begin();
        return;
    }

    if (GROUPS > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLYING));
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    float sums[GROUP_TILES][WIDTH / 2] = {};
    for (int piece = 0; piece < pieces; ++piece) {
        const u32 x = ring + piece % STAGES * STAGE_BYTES + group * GROUP_TILES * TILE_BYTES;
        const u32 weight = ring + piece % STAGES * STAGE_BYTES + X_BYTES;
        wait_for(full + piece % STAGES * 8, piece / STAGES & 1);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int tile = 0; tile < GROUP_TILES; ++tile) {
                multiply(sums[tile], matrix(x + tile * TILE_BYTES + step * 32), matrix(weight + step * 32));
            }
        }
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (lane == 0) arrive(empty + piece % STAGES * 8);
    }

    // h goes through the ring, which all have read, tile by tile to where it belongs.
    asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 128) : "memory");
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; ++tile) {
        const int place = group * GROUP_TILES + tile;
        const u32 h = ring + place * 64 * HALF * 2;
        // Of a product, a thread has two neighbouring columns of every eight, of two rows eight apart.
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const int row = warp * 16 + side * 8 + lane / 4;
#pragma unroll
            for (int eight = 0; eight < HALF / 8; ++eight) {
                const float* gate = &sums[tile][eight * 4 + side * 2];
                const float* up = gate + HALF / 2;
                u32 pair;
                asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
                    : "=r"(pair)
                    : "f"(gated(gate[1], up[1])), "f"(gated(gate[0], up[0])));
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(h + (row * HALF + eight * 8 + lane % 4 * 2) * 2), "r"(pair)
                             : "memory");
            }
        }
        asm volatile("fence.proxy.async.shared::cta;\nbar.sync %0, 128;" ::"r"(group + 2) : "memory");
        if (threadIdx.x % 128 == 0) {
            wait_for_launch_ahead();
            store(h_map, h, left, place * 64);
        }
    }
    if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
