// ---------------------------------------------------------------- all answers

function bins(mask, chosen, place, count) {
  const totals = new Float64Array(count);
  for (const a of chosen)
    for (let i = answers[a].start; i < answers[a].end; i++) if (mask[i]) totals[place(i, answers[a])]++;
  return shares(totals);
}
const shares = totals => {
  const sum = totals.reduce((a, b) => a + b, 0);
  return [...totals].map(v => v / sum);
};
let byEntropy = { of: null, order: [] };
// Tokens of equal entropy share their ranks evenly, as in `analysis.entropy_ranks`.
function entropyBins(mask, chosen, count) {
  const { entropy, trainable } = arrays;
  const totals = new Float64Array(count);
  const of = chosen.join();
  if (byEntropy.of !== of) {
    const order = chosen.flatMap(a => Array.from({ length: answers[a].length }, (_, n) => answers[a].start + n));
    byEntropy = { of, order: order.filter(i => trainable[i] && Number.isFinite(entropy[i])) };
    byEntropy.order.sort((a, b) => entropy[b] - entropy[a]);
  }
  const { order } = byEntropy;
  const width = order.length / count;
  for (let first = 0, next; first < order.length; first = next) {
    let inside = 0;
    for (next = first; next < order.length && entropy[order[next]] === entropy[order[first]]; next++)
      inside += mask[order[next]];
    for (let b = Math.floor(first / width); inside && b < count && b * width < next; b++) {
      totals[b] += (inside * (Math.min(next, (b + 1) * width) - Math.max(first, b * width))) / (next - first);
    }
  }
  return shares(totals);
}
// How many tokens are in one mask, or in two.
function size(chosen, one, two = one) {
  let n = 0;
  for (const a of chosen) for (let i = answers[a].start; i < answers[a].end; i++) n += one[i] & two[i];
  return n;
}
const TENTHS = Array.from({ length: 10 }, (_, n) => `${n * 10}–${n * 10 + 10} %`);

function chart(title, note, labels, measure) {
  const names = [state.method, state.second].filter(Boolean);
  const all = measure(arrays.trainable);
  const values = names.map(name => measure(kept(name)));
  const most = Math.max(...values.flat().filter(Number.isFinite), ...all, 1e-9);
  const grid = make("div", "", { className: "bars" });
  labels.forEach((label, n) => {
    names.forEach((_, m) => {
      const bar = make("div", "", { className: "bar" + (m ? " two" : "") });
      const line = make("s");
      bar.style.width = (100 * (values[m][n] || 0)) / most + "%";
      line.style.left = (100 * all[n]) / most + "%";
      grid.append(
        make("span", m ? "" : label),
        put(make("div", "", { className: "track" }), bar, line),
        make("b", share(values[m][n])),
      );
    });
  });
  const legend = names.length > 1 ? ` Full bars: ${names[0]}; striped: ${names[1]}.` : "";
  return put(
    make("article", "", { className: "card" }),
    make("h2", title),
    make("p", note + legend, { className: "quiet" }),
    grid,
  );
}

// Rows are named, and may have a line on what they are.
function tableOf(title, header, rows) {
  const table = put(make("table"), put(make("tr"), ...header.map(text => make("th", text, { scope: "col" }))));
  for (const [first, says, ...cells] of rows)
    table.append(
      put(
        make("tr", "", { className: first === state.method || first === state.second ? "chosen" : "" }),
        put(make("th", "", { scope: "row" }), first, ...(says ? [make("small", says)] : [])),
        ...cells.map(text => make("td", text)),
      ),
    );
  const box = make("div", "", { className: "wide card", tabindex: 0, role: "group", "aria-label": title });
  return put(make("section"), make("h2", title), put(box, table));
}

function drawAll() {
  const chosen = included().filter(matching);
  const view = put($("view2"));
  if (!chosen.length) return;
  const mine = kept(state.method);
  const { trainable, gap, label, category } = arrays;
  const kinds = mask => bins(mask, chosen, i => category[i], facts.categories.length);
  const total = size(chosen, trainable);
  const wide = gap && Uint8Array.from(trainable, (may, i) => may && large(i));
  const gaps = gap && size(chosen, wide);
  const right = chosen.filter(a => answers[a].right).length;
  const wrong = chosen.filter(a => answers[a].right === false).length;
  const told = [
    `${many(chosen.length, "answer")} to ${many(new Set(chosen.map(a => answers[a].problem)).size, "problem")}, ${many(total, "token")}`,
  ];
  if (right + wrong) told.push(`${right} answers are right, ${wrong} wrong`);
  if (gap) told.push(`${many(gaps, "token")} with a gap of ${state.gap} nats or more`);
  view.append(make("p", (state.query ? "Of what is found: " : "") + told.join("; ") + "."));
  const header = [
    "Method",
    "kept",
    `also kept by ${state.method}`,
    ...(gap ? ["large gaps caught"] : []),
    ...(label ? ["precision", "recall"] : []),
  ];
  view.append(
    tableOf(
      everyMethod(),
      header,
      facts.methods.map(({ name, says }) => {
        const mask = kept(name);
        const n = size(chosen, mask);
        const measured = [n / total, size(chosen, mask, mine) / n];
        if (gap) measured.push(size(chosen, mask, wide) / gaps);
        if (label) measured.push(...Object.values(found(name, chosen)));
        const cells = measured.map(share);
        if (unbudgeted(name)) cells[0] += ", no\u00a0budget";
        return [name, says, ...cells];
      }),
    ),
  );
  const truth =
    "Precision: how many of the kept tokens depend on a condition. Recall: how many of the tokens that do are kept. Both, as in crop-trl selectors, among the tokens of which that is known, of which the budget is a share.";
  view.append(
    make(
      "p",
      `Also kept by ${state.method}: of the tokens that the row's method keeps. ${gap ? "Large gaps caught: of the tokens with a large gap, those that are kept. " : ""}${label ? truth : ""}`,
      { className: "quiet" },
    ),
  );
  const charts = make("div", "", { className: "charts" });
  const dotted = "Dotted: of all tokens.";
  const tenth = (i, { start, length }) => Math.floor((10 * (i - start)) / length);
  charts.append(
    chart("Where in the answer", `Share of the kept tokens by tenths of the answer. ${dotted}`, TENTHS, mask =>
      bins(mask, chosen, tenth, 10),
    ),
  );
  charts.append(
    chart("What kind of token", `Share of the kept tokens, told by lists of words. ${dotted}`, facts.categories, kinds),
  );
  if (arrays.entropy)
    charts.append(
      chart(
        "How sure the student was",
        `Tokens in the order of the student's entropy, the most uncertain tenth first. ${dotted}`,
        TENTHS,
        mask => entropyBins(mask, chosen, 10),
      ),
    );
  view.append(charts);
  const steps = [...new Set(chosen.map(a => answers[a].step))];
  if (steps.length > 1)
    view.append(
      tableOf(
        `${state.method} at each step`,
        ["Step", "answers", "right", "tokens", "kept"],
        steps.map(step => {
          const here = chosen.filter(a => answers[a].step === step);
          const graded = here.filter(a => answers[a].right !== null);
          const all = size(here, trainable);
          return [
            String(step),
            "",
            String(here.length),
            share(graded.filter(a => answers[a].right).length / graded.length),
            all.toLocaleString("en"),
            share(size(here, mine) / all),
          ];
        }),
      ),
    );
}

// ---------------------------------------------------------------- the list

function drawList() {
  const mine = kept(state.method);
  const other = state.second ? kept(state.second) : null;
  const columns = [
    ["Answer", a => a + 1, v => String(v)],
    ...($("steps").hidden ? [] : [["Step", a => answers[a].step, String]]),
    ["Right?", a => ({ true: 1, false: 0 })[answers[a].right] ?? -1, v => ["–", "✗ wrong", "✓ right"][v + 1]],
    ["Problem", a => original(a), text => brief(text, 200), "problem"],
    ["Tokens", a => answers[a].length, String],
  ];
  const over = test => a => {
    let n = 0;
    for (let i = answers[a].start; i < answers[a].end; i++) n += test(i) ? 1 : 0;
    return n;
  };
  if (arrays.gap) {
    columns.push([
      "Mean gap",
      a => {
        let sum = 0;
        let n = 0;
        for (let i = answers[a].start; i < answers[a].end; i++)
          if (arrays.trainable[i]) {
            sum += arrays.gap[i];
            n++;
          }
        return sum / n;
      },
      signed,
    ]);
    columns.push(
      ["Large gaps", over(i => arrays.trainable[i] && large(i)), String],
      ["Large gaps not kept", over(i => arrays.trainable[i] && large(i) && !mine[i]), String],
    );
  }
  if (other) columns.push(["Kept by one alone", over(LOOKS.differ[2]), String]);
  const sorted = columns.find(([name]) => name === state.sort) ?? columns[0];
  const rows = included()
    .filter(matching)
    .map(a => columns.map(([, value]) => value(a)));
  const by = columns.indexOf(sorted);
  const way = state.falling ? -1 : 1;
  const compare = (x, y) =>
    typeof x === "string" ? x.localeCompare(y) : (Number.isNaN(x) ? -Infinity : x) - (Number.isNaN(y) ? -Infinity : y);
  if (state.sort) rows.sort((x, y) => way * compare(x[by], y[by]) || x[0] - y[0]);
  const table = make("table");
  const head = make("tr");
  for (const [name, , , side] of columns) {
    const arrow = name === state.sort ? (state.falling ? "↓" : "↑") : "";
    const button = make("button", "", {
      onclick: () => {
        state.falling = name === state.sort ? !state.falling : name !== "Answer" && name !== "Problem";
        state.sort = name;
        drawList();
      },
    });
    head.append(
      put(
        make("th", "", {
          scope: "col",
          className: side ?? "",
          ...(arrow ? { "aria-sort": state.falling ? "descending" : "ascending" } : {}),
        }),
        put(button, name + "\u00a0", make("i", arrow || "↕", { "aria-hidden": true })),
      ),
    );
  }
  table.append(head);
  for (const row of rows) {
    const a = row[0] - 1;
    const line = make("tr", "", {
      className: a === state.answer ? "chosen" : "",
      onclick: () => {
        show(1);
        open(a);
      },
    });
    row.forEach((value, n) =>
      line.append(
        n
          ? make("td", columns[n][2](value), { className: columns[n][3] ?? "" })
          : put(make("td"), make("button", String(value), { "aria-label": `Open answer ${value}` })),
      ),
    );
    table.append(line);
  }
  const gaps = ` A gap is the student's log-probability of a token less the teacher's, below 0 where the teacher found it likelier; the mean is over all tokens of the answer, and large is ${state.gap} nats or more.`;
  $("columns").textContent = "Sort by a heading; open an answer by its line." + (arrays.gap ? gaps : "");
  put($("list"), table);
}
