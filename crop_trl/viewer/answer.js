// ---------------------------------------------------------------- one answer

const WINDOW = 1500; // tokens that are shown at once
let spans = [];
let from = 0;

function drawAnswer() {
  const answer = answers[state.answer];
  const { views, answer: gold } = problemOf(state.answer);
  $("which").value = state.answer;
  state.variant = Math.min(state.variant, views.length - 1);
  const verdictLine = put($("verdict"));
  verdictLine.className = "verdict " + (answer.right === null ? "" : verdict(state.answer));
  if (answer.right) verdictLine.append(`The answer is right: ${gold}.`);
  else if (answer.right === false) {
    verdictLine.append(`The answer is wrong; ${gold} would be right. `);
    if (answer.wrong !== null)
      verdictLine.append(
        make("button", `Go to its first wrong figure or sign (token ${answer.wrong + 1})`, {
          onclick: () => go(answer.start + answer.wrong),
        }),
      );
  } else
    verdictLine.append(gold === null ? "Nothing here says which answer is right." : `The right answer is ${gold}.`);
  put(
    $("prompts"),
    ...views[state.variant].map(([kind, heading, pieces]) => {
      const title = make("h2", heading);
      const text = make("div", "", { className: "text", tabindex: 0 });
      if (kind === "counterfactual" && views.length > 1) {
        const buttons = views.map((_, n) =>
          make("button", String(n + 1), {
            "aria-label": `Counterfactual ${n + 1} of ${views.length}`,
            "aria-pressed": n === state.variant,
            onclick: () => {
              state.variant = n;
              drawAnswer();
            },
          }),
        );
        title.append(put(make("span"), ...buttons));
      }
      for (const [part, mark, mathml] of pieces) {
        const drawn = mathml ? formula(mathml) : part;
        text.append(mark ? put(make("mark", "", { className: mark }), drawn) : drawn);
      }
      return put(make("article", "", { className: "card" }), title, text);
    }),
  );
  for (const text of $("prompts").querySelectorAll(".text"))
    text.scrollTop = (text.querySelector("mark")?.offsetTop ?? 0) - 40;
  const others = included().filter(a => answers[a].problem === answer.problem);
  const steps = new Set(others.map(a => answers[a].step)).size > 1;
  put(
    $("siblings"),
    ...(others.length < 2
      ? []
      : [
          "To the same problem: ",
          ...others.flatMap(a => [
            make("button", `${a + 1} ${SIGN[verdict(a)] ?? ""}`, {
              "aria-label": `Answer ${a + 1}, ${verdict(a)}` + (steps ? `, step ${answers[a].step}` : ""),
              "aria-pressed": a === state.answer,
              onclick: () => open(a),
            }),
            steps ? `(step ${answers[a].step}) ` : " ",
          ]),
        ]),
  );
  drawTokens(answer.start);
}

function drawTokens(i) {
  const { start, end } = answers[state.answer];
  from = start + Math.floor((i - start) / WINDOW) * WINDOW;
  const to = Math.min(end, from + WINDOW);
  const box = put($("tokens"));
  spans = [];
  for (let n = from; n < to; n++) {
    const text = piece(n);
    const space = text.startsWith("␣") && text.length > 1;
    const span = make("span", space ? text.slice(1) : text, { tabindex: -1, role: "button" });
    span.base =
      "t" +
      (space ? " space" : "") +
      (/^[␣⏎⇥␍⋯]+$/u.test(text) ? " blank" : "") +
      (arrays.trainable[n] ? "" : " locked");
    spans.push(span);
    box.append(span);
    if (text.includes("⏎")) box.append(make("br"));
  }
  if (!spans.length) box.append("The answer is empty.");
  else spans[0].tabIndex = 0;
  $("pages").hidden = end - start <= WINDOW;
  const turn = (text, place) =>
    make("button", text, {
      onclick: () => drawTokens(place),
      ...(place < start || place >= end ? { disabled: "" } : {}),
    });
  put(
    $("pages"),
    turn("‹ Earlier", from - WINDOW),
    `Tokens ${(from - start + 1).toLocaleString("en")} to ${(to - start).toLocaleString("en")} of ${(end - start).toLocaleString("en")}`,
    turn("Later ›", from + WINDOW),
  );
  markTokens();
}

const shadeName = () =>
  state.shade === "score" ? `score of ${state.method}` : $("shade").selectedOptions[0].textContent;
const shading = () => (state.shade === "score" ? "score " + state.method : state.shade);
const scales = {};
// The strongest value in all answers; scores of which none is above 0 are shaded by rank.
function scale(name) {
  if (!arrays[name]) return { strongest: 0 };
  if (!scales[name]) {
    let [highest, strongest] = [-Infinity, 0];
    for (const value of arrays[name].filter(Number.isFinite)) {
      highest = Math.max(highest, value);
      strongest = Math.max(strongest, Math.abs(value));
    }
    scales[name] = { strongest, ranked: name.startsWith("score ") && highest <= 0 };
  }
  return scales[name];
}
// How strongly a token is shaded, from −1 to 1.
function shadeOf(i) {
  const { strongest, ranked } = scale(shading());
  if (ranked) {
    const { rank, counts } = ranking(state.method);
    return rank[i] === NONE ? 0 : 1 - rank[i] / counts[state.answer];
  }
  const value = strongest ? arrays[shading()][i] / strongest : 0;
  return Number.isFinite(value) ? Math.sign(value) * Math.sqrt(Math.abs(value)) : 0;
}

// Where a text holds what is searched for.
function places(text) {
  const found = [];
  const { length } = state.query;
  const [within, query] = [text.toLowerCase(), state.query.toLowerCase()];
  for (let at = length ? within.indexOf(query) : -1; at >= 0; at = within.indexOf(query, at + 1))
    found.push([at, at + length]);
  return found;
}
function hits() {
  const marked = new Set();
  const { start, length } = answers[state.answer];
  const found = places(textOf(state.answer));
  for (const [at, end] of found) {
    for (let n = 0, place = 0; n < length && place < end; n++) {
      place += plain(start + n).length;
      if (place > at) marked.add(start + n);
    }
  }
  return { marked, times: found.length };
}

function markTokens() {
  const answer = answers[state.answer];
  const mine = kept(state.method);
  const other = state.second ? kept(state.second) : null;
  const searched = hits().marked;
  let here = 0;
  if (state.look) for (let i = answer.start; i < answer.end; i++) here += looking(i);
  spans.forEach((span, n) => {
    const i = from + n;
    const tint = Math.round(60 * shadeOf(i));
    span.className =
      span.base +
      (mine[i] ? " kept" : "") +
      (other?.[i] ? " second" : "") +
      (tint > 0 ? " plus" : tint < 0 ? " minus" : "") +
      (arrays.label?.[i] === 1 ? " depends" : "") +
      (i - answer.start === answer.wrong ? " first" : "") +
      (searched.has(i) ? " hit" : "") +
      (looking(i) ? "" : " aside") +
      (i === state.at ? " at" : "");
    span.style.setProperty("--a", Math.abs(tint) + "%");
  });
  const { start, end } = answer;
  const tally = { tokens: 0, mine: 0, other: 0, both: 0 };
  for (let i = start; i < end; i++) {
    tally.tokens += arrays.trainable[i];
    tally.mine += mine[i];
    if (other) {
      tally.other += other[i];
      tally.both += mine[i] & other[i];
    }
  }
  let text = `${state.method} keeps ${tally.mine} of ${many(tally.tokens, "token")} (${share(tally.mine / tally.tokens)})${unbudgeted(state.method) ? ", whatever the budget" : ""}.`;
  if (other)
    text += ` ${state.second} keeps ${tally.other}; ${tally.both} are kept by both, ${tally.mine - tally.both} by ${state.method} alone, ${tally.other - tally.both} by ${state.second} alone.`;
  $("count").textContent = text;
  if (state.look) drawLook(here);
  drawLegend(markProblem() + searched.size);
}

// What is searched for is marked in the problem as well, across what differs in it; formulas may hold it unmarked.
function markProblem() {
  const ranges = [];
  const walk = document.createTreeWalker($("prompts").querySelector(".text") ?? $("prompts"), NodeFilter.SHOW_TEXT);
  const nodes = [];
  let text = "";
  while (walk.nextNode()) {
    nodes.push([walk.currentNode, text.length]);
    text += walk.currentNode.data;
  }
  for (const [start, end] of places(text)) {
    const range = new Range();
    for (const [node, first] of nodes) {
      if (first <= start) range.setStart(node, Math.min(node.length, start - first));
      if (first < end) range.setEnd(node, Math.min(node.length, end - first));
    }
    ranges.push(range);
  }
  CSS.highlights?.set("found", new Highlight(...ranges));
  return ranges.length;
}

// How much there is of what is looked for, and the way to the next answer with some of it.
function drawLook(here) {
  const counts = included().map(a => {
    let n = 0;
    for (let i = answers[a].start; i < answers[a].end; i++) n += looking(i);
    return [a, n];
  });
  const some = counts.filter(([, n]) => n);
  const all = some.reduce((sum, [, n]) => sum + n, 0);
  const next = some.find(([a]) => a > state.answer) ?? some[0];
  $("count").append(
    ` Looked for: ${LOOKS[state.look][0]}, ${many(here, "token")} here, ${all.toLocaleString("en")} in ${some.length} of ${many(counts.length, "answer")}. `,
  );
  if (next && next[0] !== state.answer)
    $("count").append(make("button", "Next answer with some", { onclick: () => open(next[0]) }));
}

function drawLegend(searched) {
  const sample = (classes, text, meaning) =>
    put(make("span"), make("span", text, { className: "t " + classes }), meaning);
  const items = [sample("kept", "framed", `kept, so trained, by ${state.method}`)];
  if (spans.length) items.push(sample("at", "dashed", "the one in the panel"));
  if (state.second) items.push(sample("second", "underlined", `kept by ${state.second}`));
  if (answers[state.answer].wrong !== null)
    items.push(sample("first", "word", "its first wrong figure or sign (words are not checked)"));
  if (arrays.label) items.push(sample("depends", "word", "depends on a condition"));
  if (state.look) items.push(sample("aside", "pale", "not what is looked for"));
  if (searched) items.push(sample("hit", "word", "found"));
  const { strongest, ranked } = scale(shading());
  if (ranked) items.push(sample("swatch plus", "", `rank by ${state.method}, the first of each answer the darkest`));
  else if (strongest) {
    const most = strongest < 0.001 ? "under 0.001" : strongest.toLocaleString("en", { maximumSignificantDigits: 2 });
    const item = sample("swatch plus", "", `${shadeName()}, darkest at ${most}, in every answer alike`);
    if (spans.some(span => span.classList.contains("minus")))
      item.append(make("span", "", { className: "t swatch minus" }), "below 0");
    items.push(item);
  }
  put($("legend"), ...items);
}

// ---------------------------------------------------------------- one token

function go(i) {
  const { start, end } = answers[state.answer];
  i = Math.max(start, Math.min(end - 1, i));
  if (i < start) return;
  if (i < from || i >= from + spans.length) drawTokens(i);
  spans[state.at - from]?.classList.remove("at");
  spans.forEach(span => {
    span.tabIndex = -1;
  });
  state.at = i;
  const span = spans[i - from];
  span.tabIndex = 0;
  span.classList.add("at");
  drawPanel();
  span.setAttribute("aria-label", $("panel").dataset.line);
  span.focus({ preventScroll: true });
  span.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function drawPanel() {
  const i = state.at;
  const panel = $("panel");
  panel.classList.toggle("open", i >= 0);
  if (i < 0)
    return put(
      panel,
      make(
        "p",
        "Click a token, tap it, or go there with the keys (n: the next kept one). Here you see what the student and the teacher expected in its place, and how each method ranks it.",
      ),
    );
  const answer = answers[state.answer];
  const names = [state.method, state.second].filter(Boolean);
  const line = !arrays.trainable[i]
    ? "written by a tool, never trained"
    : names.map(name => `${kept(name)[i] ? "kept" : "not kept"} by ${name}`).join(", ");
  panel.dataset.line = `Token ${i - answer.start + 1} of ${answer.length}: ${piece(i)}, ${line}`;
  const parts = [
    make("button", "Close", { id: "shut", onclick: shut }),
    put(
      make("h2"),
      make("span", piece(i), { className: "big" }),
      ` token ${(i - answer.start + 1).toLocaleString("en")} of ${answer.length.toLocaleString("en")}`,
    ),
    make("p", line[0].toUpperCase() + line.slice(1) + (arrays.label ? `. ${DEPENDS[arrays.label[i]]}` : "") + "."),
  ];
  if (arrays.gap) {
    const [student, teacher] = ["student/original", facts.target].map(n =>
      logprob(
        i,
        facts.readings.findIndex(r => r.name === n),
      ),
    );
    parts.push(
      make(
        "p",
        `Log-probability: student ${signed(student)} (${share(Math.exp(student))}), teacher ${signed(teacher)} (${share(Math.exp(teacher))}); gap ${signed(arrays.gap[i])} nats, the student's less the teacher's.`,
      ),
    );
  }
  if (!["", "score", "gap"].includes(state.shade))
    parts.push(make("p", `Shaded by ${shadeName()}: ${signed(arrays[shading()][i], 3)}.`));
  if (L) parts.push(entries(i));
  const table = make("table");
  table.append(
    make("caption", everyMethod()),
    put(make("tr"), ...["Method", "score", "rank", "kept"].map(text => make("th", text, { scope: "col" }))),
  );
  const says = Object.fromEntries(facts.methods.map(m => [m.name, m.says]));
  for (const name of new Set([...names, ...Object.keys(says)])) {
    const scores = arrays["score " + name];
    const place = scores && !facts.frozen ? ranking(name).rank[i] : NONE;
    const row = put(
      make("tr", "", { className: names.includes(name) ? "chosen" : "" }),
      make("th", name, { scope: "row", title: says[name] }),
      ...(unbudgeted(name)
        ? [make("td", "no budget", { colspan: 2 })]
        : [make("td", scores ? signed(scores[i], 3) : ""), make("td", place === NONE ? "" : String(place + 1))]),
      make("td", kept(name)[i] ? "✓ kept" : "–"),
    );
    table.append(row);
  }
  put(panel, ...parts, table);
}

// What each reader expected after each prompt, the likeliest first, and how likely it found the token itself.
function entries(i) {
  const read = facts.readings
    .map((reading, r) => ({ ...reading, r }))
    .filter(({ r }) => arrays.own[i * L + r] !== NOT_READ);
  const readers = [...new Set(read.map(({ reader }) => reader))];
  const table = make("table", "", { className: "entries" });
  table.append(
    make("caption", "Expected in its place (▸ this token)"),
    put(make("tr"), ...["Prompt", ...readers].map(text => make("th", text, { scope: "col" }))),
  );
  const entry = (text, probability, said) =>
    put(make("div", "", { className: said ? "said" : "" }), text, make("i", share(probability)));
  for (const kind of new Set(read.map(one => one.kind))) {
    const cells = readers.map(reader => {
      const r = read.find(one => one.kind === kind && one.reader === reader)?.r;
      if (r === undefined) return make("td");
      const places = Array.from({ length: arrays.entries[i * L + r] }, (_, k) => facts.places[i * L + r] + k);
      const listed = places.map(place => {
        const said = arrays.entry[place] === arrays.written[i];
        const probability = Math.exp(UNLIKELY * (arrays.root[place] / 255) ** 2);
        return entry(facts.vocabulary[arrays.entry[place]], said ? Math.exp(logprob(i, r)) : probability, said);
      });
      if (!listed.some(one => one.className)) listed.push(entry(piece(i), Math.exp(logprob(i, r)), true));
      return put(make("td"), ...listed);
    });
    table.append(put(make("tr"), make("th", kind, { scope: "row" }), ...cells));
  }
  return table;
}
function shut() {
  const i = state.at;
  spans[i - from]?.classList.remove("at");
  state.at = -1;
  drawPanel();
  spans[i - from]?.focus({ preventScroll: true });
}
