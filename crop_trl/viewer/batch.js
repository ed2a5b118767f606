// ---------------------------------------------------------------- all answers

function bins(mask, chosen, place, count) {
  const totals = new Float64Array(count);
  for (const a of chosen) for (let i = answers[a].start; i < answers[a].end; i++) if (mask[i]) totals[place(i, answers[a])]++;
  return shares(totals);
}
const shares = totals => { const sum = totals.reduce((a, b) => a + b, 0); return [...totals].map(v => v / sum); };
// Tokens of equal entropy share their ranks evenly, as in `analysis.entropy_ranks`.
function entropyBins(mask, chosen, count) {
  const all = [], totals = new Float64Array(count);
  for (const a of chosen) for (let i = answers[a].start; i < answers[a].end; i++) if (arrays.trainable[i] && Number.isFinite(arrays.entropy[i])) all.push(i);
  all.sort((a, b) => arrays.entropy[b] - arrays.entropy[a]);
  for (let first = 0, next; first < all.length; first = next) {
    let inside = 0;
    for (next = first; next < all.length && arrays.entropy[all[next]] === arrays.entropy[all[first]]; next++) inside += mask[all[next]];
    for (let b = Math.floor(first * count / all.length); inside && b < count && b * all.length / count < next; b++) {
      totals[b] += inside * (Math.min(next, (b + 1) * all.length / count) - Math.max(first, b * all.length / count)) / (next - first);
    }
  }
  return shares(totals);
}
const TENTHS = Array.from({ length: 10 }, (_, n) => `${n * 10}–${n * 10 + 10} %`);

function chart(title, note, labels, measure) {
  const names = [state.method, state.second].filter(Boolean), all = measure(arrays.trainable), values = names.map(name => measure(kept(name)));
  const most = Math.max(...values.flat().filter(Number.isFinite), ...all, 1e-9), grid = make("div", "", { className: "bars" });
  labels.forEach((label, n) => {
    names.forEach((_, m) => {
      const bar = make("div", "", { className: "bar" + (m ? " two" : "") }), line = make("s");
      bar.style.width = 100 * (values[m][n] || 0) / most + "%";
      line.style.left = 100 * all[n] / most + "%";
      grid.append(make("span", m ? "" : label), put(make("div", "", { className: "track" }), bar, line), make("b", share(values[m][n])));
    });
  });
  const legend = names.length > 1 ? ` Full bars: ${names[0]}; striped: ${names[1]}.` : "";
  return put(make("article", "", { className: "card" }), make("h2", title), make("p", note + legend, { className: "quiet" }), grid);
}

function tableOf(caption, header, rows) {
  const table = make("table");
  table.append(make("caption", caption), put(make("tr"), ...header.map(text => make("th", text, { scope: "col" }))));
  for (const [first, ...cells] of rows) table.append(put(make("tr", "", { className: first === state.method || first === state.second ? "chosen" : "" }), make("th", first, { scope: "row" }), ...cells.map(text => make("td", text))));
  return put(make("div", "", { className: "wide card", tabindex: 0 }), table);
}

function drawAll() {
  const chosen = included(), view = put($("view2")), tokens = i => arrays.trainable[i];
  const each = (mask, count) => { let n = 0; for (const a of chosen) for (let i = answers[a].start; i < answers[a].end; i++) n += mask[i] && count(i) ? 1 : 0; return n; };
  const total = each(arrays.trainable, tokens), gaps = arrays.gap && each(arrays.trainable, large), mine = kept(state.method);
  const judged = chosen.filter(a => answers[a].right !== null);
  view.append(make("p", `${many(chosen.length, "answer")} to ${many(new Set(chosen.map(a => answers[a].problem)).size, "problem")}, ${many(total, "token")}`
    + (judged.length ? `; ${judged.filter(a => answers[a].right).length} answers are right, ${judged.filter(a => !answers[a].right).length} wrong` : "")
    + (arrays.gap ? `; ${many(gaps, "token")} with a gap of ${$("gap").value} nats or more` : "") + "."));
  const header = ["Method", "kept", `also kept by ${state.method}`, ...(arrays.gap ? ["large gaps caught"] : []), ...(arrays.label ? ["precision", "recall"] : []), ...facts.categories];
  view.append(tableOf(`Every method at a budget of ${state.percent} %`, header, facts.methods.map(({ name }) => {
    const mask = kept(name), n = each(mask, tokens), truth = arrays.label && found(name, chosen);
    return [name, share(n / total), share(each(mask, i => mine[i]) / n), ...(arrays.gap ? [share(each(mask, large) / gaps)] : []), ...(arrays.label ? [share(truth.precision), share(truth.recall)] : []),
      ...bins(mask, chosen, i => arrays.category[i], facts.categories.length).map(share)];
  })));
  view.append(make("p", "Also kept: of the tokens that the row's method keeps. Then kinds of kept tokens, by word lists."
    + (arrays.label ? " Precision and recall are of tokens that depend on a condition, as crop-trl selectors measures them: among the tokens of which that is known, of which the budget is a share." : ""), { className: "quiet" }));
  const charts = make("div", "", { className: "charts" });
  charts.append(chart("Where in the answer", "Share of the kept tokens by tenths of the answer. Dotted: of all tokens.", TENTHS, mask => bins(mask, chosen, (i, { start, length }) => Math.floor(10 * (i - start) / length), 10)));
  charts.append(chart("What kind of token", "Share of the kept tokens by word lists. Dotted: of all tokens.", facts.categories, mask => bins(mask, chosen, i => arrays.category[i], facts.categories.length)));
  if (arrays.entropy) charts.append(chart("How sure the student was", "Tokens in the order of the student's entropy, the most uncertain tenth first. Dotted: of all tokens.", TENTHS, mask => entropyBins(mask, chosen, 10)));
  view.append(charts);
  const steps = [...new Set(chosen.map(a => answers[a].step))];
  if (steps.length > 1) {
    view.append(tableOf(`${state.method} at each step`, ["Step", "answers", "right", "tokens", "kept", ...facts.categories], steps.map(step => {
      const here = chosen.filter(a => answers[a].step === step), count = mask => here.reduce((sum, a) => { for (let i = answers[a].start; i < answers[a].end; i++) sum += mask[i]; return sum; }, 0);
      const graded = here.filter(a => answers[a].right !== null);
      return [String(step), String(here.length), share(graded.filter(a => answers[a].right).length / graded.length), count(arrays.trainable).toLocaleString("en"), share(count(mine) / count(arrays.trainable)),
        ...bins(mine, here, i => arrays.category[i], facts.categories.length).map(share)];
    })));
  }
  const ranked = facts.methods.map(m => m.name).filter(name => arrays["score " + name]);
  if (ranked.length > 1) view.append(tableOf("Of the tokens kept by the row's method, the share that the column's keeps too", ["", ...ranked], ranked.map(row => {
    const mask = kept(row), n = each(mask, tokens);
    return [row, ...ranked.map(column => { const other = kept(column); return share(each(mask, i => other[i]) / n); })];
  })));
}

// ---------------------------------------------------------------- the list

function drawList() {
  const mine = kept(state.method), other = state.second ? kept(state.second) : null;
  const columns = [["Answer", a => a + 1, v => String(v)], ...($("steps").hidden ? [] : [["Step", a => answers[a].step, String]]), 
    ["Right?", a => ({ true: 1, false: 0 })[answers[a].right] ?? -1, v => ["–", "✗ wrong", "✓ right"][v + 1]], ["Problem", a => original(a), text => text.slice(0, 60), "left"], ["Tokens", a => answers[a].length, String]];
  const over = test => a => { let n = 0; for (let i = answers[a].start; i < answers[a].end; i++) n += test(i) ? 1 : 0; return n; };
  if (arrays.gap) {
    columns.push(["Mean gap", a => { let sum = 0, n = 0; for (let i = answers[a].start; i < answers[a].end; i++) if (arrays.trainable[i]) { sum += arrays.gap[i]; n++; } return sum / n; }, signed]);
    columns.push(["Large gaps", over(i => arrays.trainable[i] && large(i)), String], ["of these not kept", over(i => arrays.trainable[i] && large(i) && !mine[i]), String]);
  }
  if (arrays["score crop"]) columns.push(["Kept, no margin", over(LOOKS.idle[2]), String]);
  if (other) columns.push(["Kept by one alone", over(LOOKS.differ[2]), String]);
  const sorted = columns.find(([name]) => name === state.sort) ?? columns[0];
  const rows = included().filter(matching).map(a => columns.map(([, value]) => value(a)));
  const by = columns.indexOf(sorted), way = state.falling ? -1 : 1;
  const compare = (x, y) => typeof x === "string" ? x.localeCompare(y) : (Number.isNaN(x) ? -Infinity : x) - (Number.isNaN(y) ? -Infinity : y);
  if (state.sort) rows.sort((x, y) => way * compare(x[by], y[by]) || x[0] - y[0]);
  const table = make("table"), head = make("tr");
  for (const [name, , , side] of columns) {
    const arrow = name === state.sort ? (state.falling ? " ↓" : " ↑") : "";
    const button = make("button", name + arrow, { onclick: () => { state.falling = name === state.sort ? !state.falling : name !== "Answer" && name !== "Problem"; state.sort = name; drawList(); } });
    head.append(put(make("th", "", { scope: "col", className: side ?? "", ...(arrow ? { "aria-sort": state.falling ? "descending" : "ascending" } : {}) }), button));
  }
  table.append(head);
  for (const row of rows) {
    const a = row[0] - 1, line = make("tr", "", { className: a === state.answer ? "chosen" : "", onclick: () => { show(1); open(a); } });
    row.forEach((value, n) => line.append(n ? make("td", columns[n][2](value), { className: columns[n][3] ?? "" }) : put(make("td"), make("button", String(value), { "aria-label": `Open answer ${value}` }))));
    table.append(line);
  }
  put($("list"), table);
  $("found").textContent = state.query ? `${many(rows.length, "answer")} found.` : `${many(rows.length, "answer")}. Sort by a heading; open one by its line.`;
}
