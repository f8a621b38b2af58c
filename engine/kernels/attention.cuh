// What a warp does with pages of keys and values in shared memory: attention by small matrix products (mma.sync), the
// softmax kept up as the pages come (Milakov and Gimelshein, 2018). Scores are kept transposed, tokens by query heads:
// eight query heads are as wide as one product.
//
// Needs of who includes it: DIM, and hopper.cuh.

constexpr int PAGE = 16, HALVES = DIM / 64, HALF_BYTES = PAGE * 128, PAGE_BYTES = HALVES * HALF_BYTES;
constexpr int STEPS = DIM / 16;  // products along a head
constexpr u32 ALL = 0xffffffff;
constexpr float NOTHING = -3e38f;  // a score below every other: its weight is 0, and never NaN
static_assert(DIM == 64 || DIM == 128);

// Matrices of 8 x 8 bf16: a thread has two neighbours of a row.
void read(u32 (&into)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3])
                 : "r"(from));
}

void read_transposed(u32 (&into)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3])
                 : "r"(from));
}

u32 transposed(u32 matrix) {
    u32 other;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(matrix));
    return other;
}

u32 pair(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

void multiply(float (&sums)[4], const u32 (&left)[4], const u32 (&right)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Over the eight threads that have the same two heads.
template <class Combine>
float over_tokens(float x, Combine combine) {
#pragma unroll
    for (int apart = 4; apart < 32; apart *= 2) x = combine(x, __shfl_xor_sync(ALL, x, apart));
    return x;
}

// Query heads of EIGHTS times eight: of an eight, a thread has head lane / 4, and of every sixteen dims of it two from
// lane % 4 * 2 on, and two more eight further on.
template <int EIGHTS>
struct Query {
    u32 pairs[EIGHTS][STEPS][2];

    // from: the thread's head of an eight, null for none.
    void ask(int e, const u32* from) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int i = 0; i < 2; ++i) pairs[e][step][i] = from ? from[step * 8 + i * 4 + threadIdx.x % 4] : 0;
        }
    }
};

// Attention of EIGHTS times eight query heads over the pages a warp has seen. Of an eight, a thread has head
// lane % 4 * 2 and the next one: the largest score, its part of the sum of weights relative to that, and of the
// weighted values dim lane / 4 and the one eight further on, of every sixteen.
template <int EIGHTS>
struct Attention {
    float largest[EIGHTS][2], total[EIGHTS][2], sums[EIGHTS][STEPS][4];

    Attention() {
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) {
            largest[e][0] = largest[e][1] = NOTHING;
            total[e][0] = total[e][1] = 0;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[e][step][i] = 0;
            }
        }
    }

    // from: where the keys of N pages lie, the values of each behind them. left: tokens of the pages that count.
    template <int N>
    void see(const Query<EIGHTS>& query, u32 from, int left, float scale) {
        constexpr int CHAINS = N == 1 ? 2 : 1;  // of products that wait for one another
        const int lane = threadIdx.x % 32, of_matrix = lane % 8, matrix = lane / 8;
        const auto at = [&](u32 page, int token, int chunk) {  // 16 bytes of a token
            return page + chunk / 8 * HALF_BYTES + token * 128 + ((chunk % 8 ^ token % 8) << 4);
        };
        float scores[EIGHTS][N][CHAINS][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int page = 0; page < N; ++page) {
                u32 k[4];
                read(k, at(from + page * 2 * PAGE_BYTES, matrix % 2 * 8 + of_matrix, step * 2 + matrix / 2));
#pragma unroll
                for (int e = 0; e < EIGHTS; ++e) multiply(scores[e][page][step % CHAINS], k, query.pairs[e][step]);
            }
        }

        u32 weights[EIGHTS][N][2];
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) {
            float weight[N][4], shrink[2];
#pragma unroll
            for (int page = 0; page < N; ++page) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const bool counts = page * PAGE + lane / 4 + i / 2 * 8 < left;
                    const float score = scores[e][page][0][i] + (CHAINS > 1 ? scores[e][page][CHAINS - 1][i] : 0.0f);
                    weight[page][i] = counts ? score * scale : NOTHING;
                }
            }
#pragma unroll
            for (int head = 0; head < 2; ++head) {
                const float before = largest[e][head];
                float here = before;
#pragma unroll
                for (int page = 0; page < N; ++page)
                    here = fmaxf(here, fmaxf(weight[page][head], weight[page][head + 2]));
                largest[e][head] = here = over_tokens(here, fmaxf);
                shrink[head] = power_of_two(before - here);
                total[e][head] *= shrink[head];
#pragma unroll
                for (int page = 0; page < N; ++page) {
                    weight[page][head] = power_of_two(weight[page][head] - here);
                    weight[page][head + 2] = power_of_two(weight[page][head + 2] - here);
                    total[e][head] += weight[page][head] + weight[page][head + 2];
                }
            }
#pragma unroll
            for (int page = 0; page < N; ++page) {
                weights[e][page][0] = transposed(pair(weight[page][0], weight[page][1]));
                weights[e][page][1] = transposed(pair(weight[page][2], weight[page][3]));
            }
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[e][step][i] *= shrink[i % 2];
            }
        }

#pragma unroll
        for (int page = 0; page < N; ++page) {
            // What lies behind the last token may be anything, and anything times a weight of 0 need not be 0.
            u32 kept[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int behind = left - page * PAGE - (lane % 4 * 2 + i * 8);
                kept[i] = behind >= 2 ? 0xffffffff : behind == 1 ? 0xffff : 0;
            }
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                u32 v[4];
                const u32 values = from + page * 2 * PAGE_BYTES + PAGE_BYTES;
                read_transposed(v, at(values, matrix / 2 * 8 + of_matrix, step * 2 + matrix % 2));
#pragma unroll
                for (int i = 0; i < 4; ++i) v[i] &= kept[i / 2];
#pragma unroll
                for (int e = 0; e < EIGHTS; ++e) multiply(sums[e][step], v, weights[e][page]);
            }
        }
    }

    // After the last page: what the eight threads of a head have of its weights.
    void finish() {
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) {
#pragma unroll
            for (int head = 0; head < 2; ++head)
                total[e][head] = over_tokens(total[e][head], [](float a, float b) { return a + b; });
        }
    }
};
