// Decode attention over the paged KV pool, as `paged_decode.py`, whose tables, partial results and sums it keeps.
//
// A program has a stream of tiles, one KV head of each. One warp loads their pages (TMA, 128-byte swizzle) into a ring
// of STAGES, PAGES pages of keys and of values in each, and runs ahead across tiles; WARPS others see them. Of a row, a
// warp sees every fourth page, and the warps put their sums together; of a run, whose members' query heads are many, a
// warp has some of the heads and sees every page.
//
// Compiled in: HEADS, KV_HEADS, DIM, MEMBERS, HEAD_ROWS (query heads of a KV head, up to a power of two), STAGES, and
// PROGRAMS, of a multiprocessor.

#include "hopper.cuh"
#include "attention.cuh"

constexpr int WARPS = 4, PAGES = WARPS, STAGE_BYTES = PAGES * 2 * PAGE_BYTES;
constexpr int GROUP = HEADS / KV_HEADS;
constexpr int RUN_EIGHTS = (MEMBERS * HEAD_ROWS + WARPS * 8 - 1) / (WARPS * 8);  // eights of a run's heads, of a warp
constexpr int FOURS = DIM / 4;  // of a head: a thread reads and writes four dims at a time
static_assert(HEAD_ROWS <= 8);

struct Arguments {
    const int *tile_owners, *tile_blocks, *tile_tokens, *streams, *first_tiles, *tile_counts, *seats, *members;
    const int* block_ids;
    const u32* q;
    unsigned short* out;
    float* part_out;
    float2* part_stats;
    int* arrived;
    int rows, places;
    float scale;
};

struct alignas(16) Shared {
    float sums[WARPS][GROUP][DIM + 4];  // four more, so that no bank is met twice
    float largest[WARPS][GROUP], total[WARPS][GROUP];
    u64 full[STAGES], empty[STAGES];
    int last;
};

struct Tile {
    int owner, tokens;
};

Tile tile_at(const Arguments& given, int place) { return {given.tile_owners[place], given.tile_tokens[place]}; }

// The tiles of a stream in the order in which they are read: the last one, then the first: both may be parts of rows,
// which take long to put together. The whole rows between them end at once.
int in_turn(int first, int end, int turn) { return turn == 0 ? end - 1 : first + turn - 1; }

struct Ring {
    u32 start, full, empty;
    int stages = 0;  // that this warp is done with

    u32 stage() const { return start + stages % STAGES * STAGE_BYTES; }
    u32 filled() const { return full + stages % STAGES * 8; }

    void wait_until_empty() const {
        if (stages >= STAGES) wait_for(empty + stages % STAGES * 8, (stages / STAGES - 1) & 1);
    }

    // The pages of a tile as they come: of every stage N from page `first` on.
    template <int N, int EIGHTS>
    void show(Attention<EIGHTS>& attention, const Query<EIGHTS>& query, int tokens, int first, float scale) {
        for (int begin = 0; begin < tokens; begin += PAGES * PAGE, ++stages) {
            const int left = tokens - begin - first * PAGE;
            wait_for(filled(), stages / STAGES & 1);
            if (left > 0) attention.template see<N>(query, stage() + first * 2 * PAGE_BYTES, left, scale);
            __syncwarp();
            if (threadIdx.x % 32 == 0) arrive(empty + stages % STAGES * 8);
        }
        attention.finish();
    }
};

void all_warps() { asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory"); }

// Is this the last of `expected` arrivals? Then the counter is zero again. What all warps wrote before their arrival
// can be read by those of the last. For all threads of all warps.
bool last_to_arrive(int* counter, int expected, int& last) {
    all_warps();
    if (threadIdx.x == 0) {
        int before;
        asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
        last = before == expected - 1;
        if (last) *counter = 0;
    }
    all_warps();
    return last;
}

void write(unsigned short* out, float4 sum, float total) {
    *reinterpret_cast<uint2*>(out) = {pair(sum.x / total, sum.y / total), pair(sum.z / total, sum.w / total)};
}

void add(float4& sum, float4 some, float weight) {
    sum.x += some.x * weight, sum.y += some.y * weight, sum.z += some.z * weight, sum.w += some.w * weight;
}

// Where a row's partial results are: those of its own tiles, and those of its run, where it is a member.
struct Parts {
    int own_first, own, run_first, run, member;

    int arrivals() const { return own + (run > 0); }
    bool whole() const { return own == 1 && run == 0; }
};

Parts parts_of(const Arguments& given, int row) {
    const int seat = given.places > 1 ? given.seats[row] : -1;
    Parts parts = {given.first_tiles[row], given.tile_counts[row], 0, 0, 0};
    if (seat >= 0) {
        const int owner = given.rows + seat / MEMBERS;
        parts.run_first = given.first_tiles[owner], parts.run = given.tile_counts[owner];
        parts.member = seat % MEMBERS;
    }
    return parts;
}

// A row's partial results put together, in the order of its tiles, then its run's: AT_ONCE reads under way.
void merge(const Arguments& given, const Parts& parts, int row, int kv_head) {
    constexpr int AT_ONCE = 16;
    for (int four = threadIdx.x; four < GROUP * FOURS; four += WARPS * 32) {
        const int head = kv_head * GROUP + four / FOURS, dim = four % FOURS * 4;
        float top = NOTHING, total = 0;
        float4 sum = {0, 0, 0, 0};
        for (int begin = 0; begin < parts.own + parts.run; begin += AT_ONCE) {
            float2 stats[AT_ONCE];
            float4 some[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int own = begin + i, of_run = own - parts.own;
                stats[i] = {NOTHING, 0};
                some[i] = {0, 0, 0, 0};
                if (of_run < parts.run) {
                    const long long tile = of_run < 0 ? parts.own_first + own : parts.run_first + of_run;
                    const long long part = (tile * given.places + (of_run < 0 ? 0 : parts.member)) * HEADS + head;
                    stats[i] = __ldcg(given.part_stats + part);
                    some[i] = __ldcg(reinterpret_cast<const float4*>(given.part_out + part * DIM + dim));
                }
            }
            const float before = top;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) top = fmaxf(top, stats[i].x);
            const float shrink = power_of_two(before - top);
            total *= shrink;
            sum = {sum.x * shrink, sum.y * shrink, sum.z * shrink, sum.w * shrink};
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const float weight = power_of_two(stats[i].x - top);
                total += stats[i].y * weight;
                add(sum, some[i], weight);
            }
        }
        write(given.out + (static_cast<long long>(row) * HEADS + head) * DIM + dim, sum, total);
    }
}

void ask_row(Query<1>& query, const Arguments& given, const Tile& tile, int kv_head) {
    if (tile.owner >= given.rows) return;
    const int inner = threadIdx.x % 32 / 4;
    const long long head = static_cast<long long>(tile.owner) * HEADS + kv_head * GROUP + inner;
    query.ask(0, inner < GROUP ? given.q + head * (DIM / 2) : nullptr);
}

// Tokens of one row. query: of this tile, and then, if it is of a row, too, of the next one.
void row_tile(const Arguments& given, Query<1>& query, int place, const Tile& tile, const Tile& next, int kv_head,
              Ring& ring, Shared& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long row = tile.owner;
    const Parts parts = parts_of(given, tile.owner);
    Attention<1> attention;
    ring.show<1>(attention, query, tile.tokens, warp, given.scale);
    ask_row(query, given, next, kv_head);

    all_warps();  // have read what the tile before left
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int head = lane % 4 * 2 + i;
        if (head >= GROUP) continue;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                shared.sums[warp][head][step * 16 + half * 8 + lane / 4] = attention.sums[0][step][half * 2 + i];
        }
        shared.largest[warp][head] = attention.largest[0][i];  // the same from eight threads
        shared.total[warp][head] = attention.total[0][i];
    }
    all_warps();
    for (int four = threadIdx.x; four < GROUP * FOURS; four += WARPS * 32) {
        const int head = four / FOURS, dim = four % FOURS * 4;
        float top = NOTHING, total = 0;
        float4 sum = {0, 0, 0, 0};
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, shared.largest[w][head]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float share = power_of_two(shared.largest[w][head] - top);
            total += shared.total[w][head] * share;
            add(sum, *reinterpret_cast<const float4*>(&shared.sums[w][head][dim]), share);
        }
        if (parts.whole()) {
            write(given.out + (row * HEADS + kv_head * GROUP + head) * DIM + dim, sum, total);
        } else {
            const long long part = static_cast<long long>(place) * given.places * HEADS + kv_head * GROUP + head;
            *reinterpret_cast<float4*>(given.part_out + part * DIM + dim) = sum;
            if (dim == 0) given.part_stats[part] = {top, total};
        }
    }
    if (!parts.whole() && last_to_arrive(given.arrived + row * KV_HEADS + kv_head, parts.arrivals(), shared.last))
        merge(given, parts, tile.owner, kv_head);
}

// Tokens that the members of a run share.
void run_tile(const Arguments& given, int place, const Tile& tile, int kv_head, Ring& ring, Shared& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, run = tile.owner - given.rows;
    const int* members = given.members + run * MEMBERS;
    Query<RUN_EIGHTS> query;
#pragma unroll
    for (int e = 0; e < RUN_EIGHTS; ++e) {
        const int head = (warp * RUN_EIGHTS + e) * 8 + lane / 4, member = head / HEAD_ROWS, inner = head % HEAD_ROWS;
        const long long row = member < MEMBERS && inner < GROUP ? members[member] : -1;
        query.ask(e, row < 0 ? nullptr : given.q + (row * HEADS + kv_head * GROUP + inner) * (DIM / 2));
    }
    Attention<RUN_EIGHTS> attention;
    ring.show<PAGES>(attention, query, tile.tokens, 0, given.scale);
#pragma unroll
    for (int e = 0; e < RUN_EIGHTS; ++e) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = (warp * RUN_EIGHTS + e) * 8 + lane % 4 * 2 + i;
            const int member = head / HEAD_ROWS, inner = head % HEAD_ROWS;
            if (member >= MEMBERS || inner >= GROUP || members[member] < 0) continue;
            const long long of_member = static_cast<long long>(place) * given.places + member;
            const long long part = of_member * HEADS + kv_head * GROUP + inner;
            float* sums = given.part_out + part * DIM + lane / 4;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
#pragma unroll
                for (int half = 0; half < 2; ++half) sums[step * 16 + half * 8] = attention.sums[e][step][half * 2 + i];
            }
            if (lane / 4 == 0) given.part_stats[part] = {attention.largest[e][i], attention.total[e][i]};
        }
    }
    int* arrived = given.arrived + kv_head;
    if (!last_to_arrive(arrived + tile.owner * KV_HEADS, given.tile_counts[tile.owner], shared.last)) return;
    for (int member = 0; member < MEMBERS; ++member) {
        const int row = members[member];
        if (row < 0) continue;
        const Parts parts = parts_of(given, row);
        if (last_to_arrive(arrived + row * KV_HEADS, parts.arrivals(), shared.last)) merge(given, parts, row, kv_head);
    }
}

// Every page of a stream's tiles. The tables, and all tokens but the newest, were there before the launch ahead, which
// began this one only after what came before it had ended. The newest token of a row is in the last stage of a tile.
void load_pages(const TensorMap& keys, const TensorMap& values, const Arguments& given, int first, int end, int kv_head,
                Ring ring) {
    const int lane = threadIdx.x % 32, which = lane / (2 * HALVES), part = lane % (2 * HALVES);
    bool waited = false;
    for (int turn = 0; turn < end - first; ++turn) {
        const int place = in_turn(first, end, turn);
        const int* blocks = given.block_ids + given.tile_blocks[place];
        const int pages = (given.tile_tokens[place] + PAGE - 1) / PAGE;
        int ids = 0;
        for (int page = 0; page < pages; page += PAGES, ++ring.stages) {
            if (page % 32 == 0) ids = page + lane < pages ? blocks[page + lane] : 0;
            if (!waited && page + PAGES >= pages) {
                wait_for_launch_ahead();
                waited = true;
            }
            const int held = min(PAGES, pages - page), block = __shfl_sync(ALL, ids, (page + which) % 32);
            ring.wait_until_empty();
            if (lane == 0) arrive_and_expect(ring.filled(), held * 2 * PAGE_BYTES);
            __syncwarp();
            if (which < held) {
                load(ring.stage() + which * 2 * PAGE_BYTES + part * HALF_BYTES, part < HALVES ? keys : values,
                     ring.filled(), part % HALVES * 64, kv_head, block * PAGE);
            }
        }
    }
    if (!waited) wait_for_launch_ahead();
}

// keys, values: bf16[blocks * PAGE, KV_HEADS, DIM], in boxes of PAGE tokens of 64 dims of one head. q: bf16[rows,
// HEADS, DIM] -> out, alike.
extern "C" __global__ void __launch_bounds__(WARPS * 32 + 32, PROGRAMS)
    tma_decode(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values,
               const __grid_constant__ Arguments given) {
    extern __shared__ char memory[];
    __shared__ Shared shared;
    Ring ring = {(in_shared(memory) + 1023) & ~1023u, in_shared(shared.full), in_shared(shared.empty)};
    if (threadIdx.x == 0) {
        prefetch(keys);
        prefetch(values);
        for (int stage = 0; stage < STAGES; ++stage) {
            expect_arrivals(ring.full + stage * 8, 1);
            expect_arrivals(ring.empty + stage * 8, WARPS);
        }
        barriers_are_set();
    }
    __syncthreads();
    const int kv_head = blockIdx.x % KV_HEADS, stream = blockIdx.x / KV_HEADS;
    const int first = given.streams[stream], end = given.streams[stream + 1];
    if (threadIdx.x >= WARPS * 32) {
        load_pages(keys, values, given, first, end, kv_head, ring);
        return;
    }
    wait_for_launch_ahead();
    let_next_launch_begin();
    if (first == end) return;
    Query<1> query;
    Tile tile = tile_at(given, end - 1);
    ask_row(query, given, tile, kv_head);
    for (int turn = 0; turn < end - first; ++turn) {
        const int place = in_turn(first, end, turn);
        const Tile next = tile_at(given, in_turn(first, end, turn + 1));  // or any, after the last one
        if (tile.owner < given.rows) {
            row_tile(given, query, place, tile, next, kv_head, ring, shared);
        } else {
            run_tile(given, place, tile, kv_head, ring, shared);
            ask_row(query, given, next, kv_head);
        }
        tile = next;
    }
}
