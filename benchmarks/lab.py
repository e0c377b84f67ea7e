import itertools, sys, time, torch
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from sgld_lora_merge.kernels import MergeJob, Term, reference
from sgld_lora_merge.kernels import triton as kt
from sgld_lora_merge.precision import Precision
from sgld_lora_merge.targets import Span
B, H, F = torch.bfloat16, torch.float16, torch.float32
def job(m, n, r, w, p, s, k=1):
    base = torch.empty(m, n, device="cuda").normal_(0, .02).to(w)
    terms = []
    for _ in range(k):
        a = torch.empty(r, n, device="cuda").normal_(0, .05).to(p); b = torch.empty(m, r, device="cuda").normal_(0, .05).to(p)
        terms.append(Term(a, b, s, (Span(0, m),), (Span(0, n),)))
    return MergeJob(torch.full_like(base, float("nan")), base, tuple(terms))
def run(jobs, prec):
    return kt.merge(jobs, prec, kt.scratch_for(jobs, prec))
def warm(v):
    kt._merge_group.warmup(torch.int64, torch.float32, *[1] * 5, grid=(1,), **kt._constants(v))
MANT = {B: 8, H: 11, F: 24}; SMALL = {B: -133, H: -24, F: -149}
SH = ((3072, 3072), (1000, 1544), (77, 1536), (1, 3072), (3072, 1), (77, 53), (320, 320), (5120, 3840), (3072, 15), (15, 3072), (2048, 64))
ER = [*range(1, 65), 72, 80, 96, 100, 112, 120, 128, 160, 192, 256, 300, 320, 384, 512, 1024]
AR = (1, 3, 16, 64, 100, 128, 300)
if __name__ == "__main__":
    t0 = time.time()
    kt.EXACT_RANKS = set(range(1, 2000))
    vs = {}
    def want(m, n, r, w, p, prec, k=1):
        al = n % 8 == 0
        v = kt.Variant(m, n, w, p, p, (r,) * k, al, prec is Precision.FP16)
        vs[tuple(sorted((k2, str(x)) for k2, x in kt._constants(v).items()))] = v
    for (m, n), r, w in itertools.product(SH, ER, (B, H)): want(m, n, r, w, w, Precision.FP16)
    for (m, n), r, w, p in itertools.product(SH[:6], AR, (B, H, F), (B, H, F)): want(m, n, r, w, p, Precision.FP32)
    for k in (2, 3): want(3072, 3072, 64, B, B, Precision.FP32, k)
    print("variants", len(vs))
    with ProcessPoolExecutor(16, mp_context=get_context("spawn")) as pool: list(pool.map(warm, vs.values()))
    print("compiled", time.time() - t0, flush=True)
    torch.manual_seed(int(time.time()))
    for w in (B, H):
        for m, n in SH:
            row = []
            for r in ER:
                worst = 0
                for s in (1.5, 0.7071):
                    j = job(m, n, r, w, w, s); run([j], Precision.FP16)
                    t = j.terms[0]
                    worst = max(worst, int((j.out != j.base + ((t.b @ t.a) * s)).sum()))
                if worst: row.append(f"{r}:{worst}")
            print("fp16", str(w)[6:], (m, n), "differ:", *row, flush=True)
    print("t", time.time() - t0)
    for w, p in itertools.product((B, H, F), (B, H, F)):
        for r in AR:
            worst = 0.0; diff = el = 0; lossd = 0.0
            for (m, n), s in itertools.product(SH[:6], (1.5, -3.25)):
                j = job(m, n, r, w, p, s); (st,) = run([j], Precision.FP32); t = j.terms[0]; o = j.out
                bb, aa = t.b.double(), t.a.double()
                exact = j.base.double() + s * (bb @ aa)
                bound = j.base.double().abs() + abs(s) * (bb.abs() @ aa.abs())
                e = torch.frexp(exact.to(w).double())[1].double(); ulp = torch.exp2((e - MANT[w]).clamp_min(SMALL[w]))
                over = ((o.double() - exact).abs() - .5 * ulp) / (4 * r * 2.0**-24 * bound)
                worst = max(worst, over.max().item() if not over.isnan().any() else 1e9)
                diff += int((o != exact.to(w)).sum()); el += o.numel()
                lost, upd = (exact - o.double()).square().sum().item(), (exact - j.base.double()).square().sum().item()
                lossd = max(lossd, abs(st.lost_sq / lost - 1) if lost else 0, abs(st.update_sq / upd - 1) if upd else 0)
                assert st.non_finite == 0
            print("fp32", str(w)[6:], "pair", str(p)[6:], f"r{r} over {worst:.3f} differ {diff/el:.1e} stats {lossd:.1e}", flush=True)
    print("t", time.time() - t0)
    # kinds of terms, above 2**31 bytes and elements
    for k in (2, 3):
        j = job(3072, 3072, 64, B, B, 1.5, k); run([j], Precision.FP32)
        ex = j.base.double() + sum(t.scale * (t.b.double() @ t.a.double()) for t in j.terms); print("terms", k, (j.out != ex.to(B)).double().mean().item())
        run([j], Precision.FP16); o = j.base
        for t in j.terms: o = o + (t.b @ t.a) * t.scale
        print("terms fp16", k, int((j.out != o).sum()))
    m, n = 40000, 65536
    j = job(m, n, 16, B, B, 1.5); (st,) = run([j], Precision.FP16); bad = 0
    for i in range(0, m, 4000): bad += int((j.out[i:i+4000] != j.base[i:i+4000] + (j.terms[0].b[i:i+4000] @ j.terms[0].a) * 1.5).sum())
    print("large", m * n / 2**31, bad, st)
    print("t", time.time() - t0)
