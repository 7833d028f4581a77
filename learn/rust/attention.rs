// FlashAttention-2's forward pass in one Rust file: std alone, any length, causal, threads.
//
//   rustc --edition 2021 -O -C target-cpu=native --crate-type cdylib attention.rs
//
// Tensors are f32, row-major: q, out (heads, queries, d); k, v (heads, keys, d); lse (heads, queries). A query that sees
// no key has out 0 and lse -infinity. The compiler proves what C++ programs promise: threads write to parts of `out` that
// do not overlap, because chunks_mut hands each part out once.
use std::sync::Mutex;

const BLOCK: usize = 64;

/// out and lse of `rows` queries, the first of which is number `first` of its head.
fn query_block(first: usize, d: usize, causal: bool, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32], lse: &mut [f32]) {
    let (rows, keys, scale) = (lse.len(), k.len() / d, 1.0 / (d as f32).sqrt());
    let (mut m, mut l) = ([f32::MIN; BLOCK], [0f32; BLOCK]);
    let (mut transposed, mut s) = (vec![0f32; d * BLOCK], [[0f32; BLOCK]; BLOCK]);
    out.fill(0.0);
    let end = if causal { keys.min(first + rows) } else { keys };
    for j0 in (0..end).step_by(BLOCK) {
        let columns = BLOCK.min(keys - j0);
        for j in 0..BLOCK {
            for c in 0..d {
                transposed[c * BLOCK + j] = if j < columns { k[(j0 + j) * d + c] } else { 0.0 };
            }
        }
        for i in 0..rows {
            let row = &mut s[i]; // S = Q K^T, a vector of keys at a time
            row.fill(0.0);
            for c in 0..d {
                let x = q[i * d + c] * scale;
                for (sum, y) in row.iter_mut().zip(&transposed[c * BLOCK..(c + 1) * BLOCK]) {
                    *sum += x * y;
                }
            }
            let seen = if causal { columns.min((first + i + 1).saturating_sub(j0)) } else { columns };
            let largest = row[..seen].iter().fold(m[i], |a, &b| a.max(b)); // the online softmax
            let factor = (m[i] - largest).exp();
            m[i] = largest;
            l[i] *= factor;
            let o = &mut out[i * d..(i + 1) * d];
            o.iter_mut().for_each(|x| *x *= factor);
            for j in 0..seen {
                let weight = (row[j] - largest).exp();
                l[i] += weight;
                for (sum, y) in o.iter_mut().zip(&v[(j0 + j) * d..(j0 + j + 1) * d]) {
                    *sum += weight * y; // O += P V
                }
            }
        }
    }
    for i in 0..rows {
        if l[i] > 0.0 {
            out[i * d..(i + 1) * d].iter_mut().for_each(|x| *x /= l[i]);
        }
        lse[i] = if l[i] > 0.0 { m[i] + l[i].ln() } else { f32::NEG_INFINITY };
    }
}

/// All heads; query blocks are given to threads one by one.
pub fn attention(heads: usize, d: usize, causal: bool, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32], lse: &mut [f32]) {
    let (queries, keys) = (q.len() / d / heads, k.len() / d / heads);
    let mut tasks = Vec::new();
    for (h, (out, lse)) in out.chunks_mut(queries * d).zip(lse.chunks_mut(queries)).enumerate() {
        for (n, (out, lse)) in out.chunks_mut(BLOCK * d).zip(lse.chunks_mut(BLOCK)).enumerate() {
            tasks.push((h, n * BLOCK, out, lse));
        }
    }
    let tasks = Mutex::new(tasks); // taken from the end: the blocks that see most keys of a causal call come first
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| loop {
                let task = tasks.lock().unwrap().pop();
                let (h, first, out, lse) = match task {
                    Some(task) => task,
                    None => break,
                };
                let (at, key) = ((h * queries + first) * d, h * keys * d);
                let (k, v) = (&k[key..key + keys * d], &v[key..key + keys * d]);
                query_block(first, d, causal, &q[at..at + lse.len() * d], k, v, out, lse);
            });
        }
    });
}

/// The same for C: pointers to as many numbers as the sizes say.
///
/// # Safety
/// The tensors must be as large as the sizes say, and out and lse overlap nothing.
#[no_mangle]
pub unsafe extern "C" fn attention_forward(
    heads: i32, queries: i32, keys: i32, d: i32, causal: i32,
    q: *const f32, k: *const f32, v: *const f32, out: *mut f32, lse: *mut f32,
) {
    let (heads, queries, keys, d) = (heads as usize, queries as usize, keys as usize, d as usize);
    if heads * queries * d == 0 {
        return;
    }
    let of = |data, rows| std::slice::from_raw_parts(data, heads * rows * d);
    let (out, lse) = (
        std::slice::from_raw_parts_mut(out, heads * queries * d),
        std::slice::from_raw_parts_mut(lse, heads * queries),
    );
    attention(heads, d, causal != 0, of(q, queries), of(k, keys), of(v, keys), out, lse);
}
