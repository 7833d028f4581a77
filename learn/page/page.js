// The page's loops. A step is a part of a tile's work; `steps()` makes all of them, so that going back is showing an earlier one.
const { block, q, k, v, rules } = DATA;
const count = q.length, channels = q[0].length, blocks = count / block, scale = 1 / Math.sqrt(channels);
const range = (first, size) => Array.from({ length: size }, (_, i) => first + i);
const $ = (id) => document.getElementById(id);

// skip, full or partial: the class of a tile, from what the library says that each query sees.
function tileClass(sees, i, j) {
  const seen = range(i * block, block).map((x) => range(j * block, block).filter((y) => sees[x][y]).length);
  const sum = seen.reduce((a, b) => a + b);
  return sum === 0 ? "skip" : sum === block * block ? "full" : "partial";
}

// The tiles that are visited, in the order of the loops.
function visits(sees, loops) {
  const order = range(0, blocks * blocks).map((n) => [Math.floor(n / blocks), n % blocks]);
  return order.map(([a, b]) => (loops === "1" ? [b, a] : [a, b])).filter(([i, j]) => tileClass(sees, i, j) !== "skip");
}

function steps(sees, loops) {
  const m = Array(count).fill(-Infinity), l = Array(count).fill(0), o = range(0, count).map(() => Array(channels).fill(0));
  const made = [], tiles = visits(sees, loops), done = [];
  const divided = loops === "1"; // FlashAttention-1 keeps O divided by l
  const keep = (says, now, tile, rescaled = [], changed = []) =>
    made.push({ says, now, tile, rescaled, changed, done: done.slice(), m: m.slice(), l: l.slice(), o: o.map((row) => row.slice()) });
  keep(divided ? "Start: O, l and m of all queries wait in memory." : "Start: a query block keeps its O, l and m close until all its keys have passed.");
  tiles.forEach(([i, j], n) => {
    const rows = range(i * block, block), columns = range(j * block, block), kind = tileClass(sees, i, j);
    const s = rows.map((x) => columns.map((y) => q[x].reduce((sum, number, c) => sum + number * k[y][c], 0) * scale));
    const seen = rows.map((x) => columns.map((y) => sees[x][y]));
    keep(`Query block ${i}, key block ${j}: S = Q K\u1d40 / \u221ad.`, [i, j], { rows, columns, values: s });
    if (kind === "partial") keep("The tile is partial: the words hide pairs.", [i, j], { rows, columns, values: s, seen });
    const p = s.map((row) => row.slice()), factors = [];
    rows.forEach((x, r) => {
      const visible = s[r].filter((_, c) => seen[r][c]);
      const largest = Math.max(m[x], ...visible);
      factors.push(m[x] === largest ? 1 : Math.exp(m[x] - largest));
      p[r] = s[r].map((number, c) => (seen[r][c] ? Math.exp(number - largest) : 0));
      m[x] = largest;
    });
    const before = l.slice();
    rows.forEach((x, r) => (l[x] = l[x] * factors[r] + p[r].reduce((a, b) => a + b, 0)));
    const risen = rows.filter((x, r) => factors[r] !== 1 && before[x] > 0); // at a first visit nothing is rescaled
    keep("P = exp(S \u2212 m) with the new maximum m; l is rescaled by f = exp(m before \u2212 m now), then P is added.", [i, j],
      { rows, columns, values: p, seen, factors, risen }, risen, rows);
    rows.forEach((x, r) => {
      const old = divided ? before[x] * factors[r] : factors[r];
      o[x] = o[x].map((number, c) => number * old + columns.reduce((sum, y, t) => sum + p[r][t] * v[y][c], 0));
      if (divided && l[x] > 0) o[x] = o[x].map((number) => number / l[x]);
    });
    done.push(`${i},${j}`);
    keep(divided ? "O is multiplied by the old l, rescaled, P V is added, and it is divided by the new l." : "O = O f + P V.", [i, j],
      { rows, columns, values: p, seen, factors, risen }, risen, rows);
    const last = !divided && (n + 1 === tiles.length || tiles[n + 1][0] !== i);
    if (last) {
      rows.forEach((x) => (o[x] = o[x].map((number) => (l[x] > 0 ? number / l[x] : 0))));
      keep(`All keys of query block ${i} have passed: O is divided by l, once.`, [i, j], null, [], rows);
    }
  });
  keep("Done. lse = m + log l.");
  return made;
}

// --- What is shown ---------------------------------------------------------------------------------------------------

const short = (x) => (Number.isFinite(x) ? x.toFixed(2) : x > 0 ? "\u221e" : "\u2212\u221e");
const cell = (text, kind = "", tag = "td") => `<${tag} class="${kind}">${text}</${tag}>`;
const table = (head, rows) => `<table><tr>${head.map((x) => cell(x, "", "th")).join("")}</tr>${rows.map((row) => `<tr>${row.join("")}</tr>`).join("")}</table>`;

function grid(sees, step) {
  const body = range(0, count).map((x) => [cell(x, "", "th"), ...range(0, count).map((y) => {
    const i = Math.floor(x / block), j = Math.floor(y / block);
    const now = step.now && step.now[0] === i && step.now[1] === j;
    return cell(sees[x][y] ? "\u25cf" : "\u00b7", `${tileClass(sees, i, j)} ${now ? "now" : step.done.includes(`${i},${j}`) ? "done" : ""}`);
  })]);
  return table(["", ...range(0, count)], body);
}

function tile({ tile: shown }) {
  if (!shown) return "";
  const { rows, columns, values, seen, factors, risen } = shown;
  const body = rows.map((x, r) => [cell(x, "", "th"),
    ...columns.map((_, c) => cell(seen && !seen[r][c] ? "hidden" : short(values[r][c]), seen && !seen[r][c] ? "hidden" : "")),
    ...(factors ? [cell(short(factors[r]), risen.includes(x) ? "rescaled" : "")] : [])]);
  return table(["", ...columns, ...(factors ? ["f"] : [])], body);
}

function state(step) {
  const kind = (x) => (step.rescaled.includes(x) ? "rescaled" : step.changed.includes(x) ? "changed" : "");
  const body = range(0, count).map((x) => [cell(x, "", "th"), cell(short(step.m[x]), kind(x)), cell(short(step.l[x]), kind(x)),
    ...step.o[x].map((number) => cell(short(number), kind(x)))]);
  return table(["query", "m", "l", ...range(0, channels).map((c) => `O${c}`)], body);
}

// A query's word: bit j is set if it sees key j. The runs of a query block: neighbouring key blocks of one class.
const word = (row) => row.reduce((sum, bit, j) => sum + (bit ? 2 ** j : 0), 0).toString(16).padStart(count / 4, "0");
function runs(sees, i) {
  const found = [];
  for (const j of range(0, blocks)) {
    const kind = tileClass(sees, i, j), last = found[found.length - 1];
    if (last && last.kind === kind && last.end === j) last.end = j + 1;
    else if (kind !== "skip") found.push({ first: j, end: j + 1, kind });
  }
  return found.map((run) => `${run.first}${run.end - run.first > 1 ? `\u2013${run.end - 1}` : ""} ${run.kind}`).join(", ") || "none";
}
function words(sees) {
  const body = range(0, count).map((x) => [cell(x, "", "th"), cell(`0x${word(sees[x])}`), cell(x % block ? "" : runs(sees, x / block))]);
  return table(["query", "word", "runs of key blocks"], body);
}

let at = 0, all = [], timer = null;
function show() {
  const rule = rules[$("rule").value], step = all[at];
  $("says").textContent = step.says;
  $("position").textContent = `step ${at + 1} of ${all.length}`;
  $("grid").innerHTML = grid(rule.sees, step);
  $("tile").innerHTML = tile(step);
  $("state").innerHTML = state(step);
  $("words").innerHTML = words(rule.sees);
  const end = all[all.length - 1];
  const error = Math.max(...end.o.flatMap((row, x) => row.map((number, c) => Math.abs(number - rule.out[x][c]))),
    ...end.m.map((m, x) => Math.abs(m + Math.log(end.l[x]) - rule.lse[x])));
  $("result").textContent = at + 1 === all.length ? `The library's out and lse for this rule differ from these by at most ${error.toExponential(0)}.` : "";
  $("result").dataset.error = error;
}
function restart() {
  all = steps(rules[$("rule").value].sees, $("loops").value);
  at = 0;
  show();
}
function go(to) {
  at = Math.max(0, Math.min(all.length - 1, to));
  show();
}
function play() {
  if (timer) clearInterval(timer), (timer = null);
  else timer = setInterval(() => (at + 1 < all.length ? go(at + 1) : play()), 900);
  $("play").textContent = timer ? "stop" : "play";
}
function choose(id) {
  const list = $(id);
  list.selectedIndex = (list.selectedIndex + 1) % list.options.length;
  restart();
}

$("rule").innerHTML = Object.keys(rules).map((name) => `<option>${name}</option>`).join("");
const actions = { first: () => go(0), back: () => go(at - 1), next: () => go(at + 1), last: () => go(all.length - 1), play };
for (const [id, action] of Object.entries(actions)) $(id).addEventListener("click", action);
for (const id of ["rule", "loops"]) $(id).addEventListener("change", restart);
const keys = { ArrowLeft: actions.back, ArrowRight: actions.next, Home: actions.first, End: actions.last, " ": play, l: () => choose("loops"), r: () => choose("rule") };
document.addEventListener("keydown", (event) => {
  if (event.key === " " && event.target !== document.body) return; // presses a button, opens a list
  if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});
restart();
