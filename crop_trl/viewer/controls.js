// ---------------------------------------------------------------- controls

function refresh() {
  const chosen = facts.methods.filter(m => m.name === state.method || m.name === state.second);
  put($("says"), ...chosen.filter(m => m.says).map(m => put(make("span"), make("b", m.name), `: ${m.says}. `)));
  const looks = Object.entries(LOOKS).filter(([, [, can]]) => can());
  if (looks.length !== $("look").options.length)
    options(
      "look",
      looks.map(([value, [text]]) => [value, text]),
    );
  if (!LOOKS[state.look][1]()) state.look = "";
  $("look").value = state.look;
  if (state.view === 1) {
    markTokens();
    drawPanel();
  }
  if (state.view === 2) drawAll();
  if (state.view === 3) drawList();
  drawFound();
  remember();
}
// How many answers the search finds, and how often it does here.
function drawFound() {
  const some = included().filter(matching);
  const counted = [
    [hits().times, "this one"],
    [places(original(state.answer)).length, "its problem"],
  ];
  const here = counted.filter(([n]) => n).map(([n, where]) => `${many(n, "time")} in ${where}`);
  let text = `Found in ${some.length} of ${many(included().length, "answer")}`;
  if (state.view === 1 && some.length) text += `, ${here.join(" and ") || "not in this one"}`;
  text += some.some(a => a > state.answer) && state.view === 1 ? ". Enter goes to the next." : ".";
  $("found").hidden = !state.query;
  $("found").textContent = text;
}
function show(view) {
  // What is shown now begins below the tabs, wherever one has read in the view before.
  if (view !== state.view && $("tab1").getBoundingClientRect().top < 0) $("tab1").scrollIntoView();
  state.view = view;
  for (const n of [1, 2, 3]) {
    $("view" + n).hidden = n !== view;
    $("tab" + n).setAttribute("aria-selected", n === view);
    $("tab" + n).tabIndex = n === view ? 0 : -1;
  }
  $("panel").classList.toggle("open", view === 1 && state.at >= 0);
  refresh();
}
function open(a) {
  state.answer = a;
  state.at = -1;
  drawAnswer();
  drawPanel();
  drawFound();
  remember();
}
function step(by) {
  const chosen = included().filter(matching);
  const place = chosen.indexOf(state.answer);
  const next = place < 0 ? chosen.find(a => (a - state.answer) * by > 0) : chosen[place + by];
  if (next !== undefined) open(next);
}
function setBudget(text) {
  const valid = /^\d+(\.\d+)?$/.test(text) && Number(text) > 0 && Number(text) <= 100;
  $("refused").hidden = valid;
  $("refused").textContent = valid ? "" : `A budget is above 0 and at most 100 %; ${state.percent} % is shown.`;
  if (!valid) return;
  state.percent = text;
  if (Number($("budget").value) !== Math.round(Number(text))) $("budget").value = text;
  if ($("percent").value !== text) $("percent").value = text;
  refresh();
}
// The address keeps what is looked at, so that a view can be sent on.
function remember() {
  const { answer, method, second, percent } = state;
  try {
    history.replaceState(null, "", "#" + new URLSearchParams({ answer: answer + 1, method, second, budget: percent }));
  } catch {
    /* not in a frame */
  }
}

function vertical(i, down) {
  const here = spans[i - from].getBoundingClientRect();
  const middle = here.left + here.width / 2;
  const by = down ? 1 : -1;
  let best = i;
  let distance = Infinity;
  let line = null;
  for (let n = i - from + by; n >= 0 && n < spans.length; n += by) {
    const box = spans[n].getBoundingClientRect();
    if (Math.abs(box.top - here.top) < 6) continue;
    line ??= box.top;
    if (Math.abs(box.top - line) > 6) break;
    const off = Math.abs(box.left + box.width / 2 - middle);
    if (off < distance) {
      distance = off;
      best = from + n;
    }
  }
  return best;
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !facts) return;
  const field = event.target.closest("input, select");
  const { start, end } = answers[state.answer];
  const key = event.key;
  if (field && key !== "Escape") return;
  const inside = event.target.closest("#tokens");
  const here = Math.max(state.at, start);
  const wanted = i => (state.look ? looking(i) : kept(state.method)[i]);
  let to = null;
  if (key === "/") {
    event.preventDefault();
    $("search").focus();
  } else if (key === "Escape") {
    if (field) field.blur();
    else if (state.at >= 0) shut();
  } else if (["1", "2", "3"].includes(key)) show(Number(key));
  else if (state.view !== 1) return;
  else if (key === "[") step(-1);
  else if (key === "]") step(1);
  else if (key === "n") {
    for (let i = state.at < 0 ? start : here + 1; i < end; i++)
      if (wanted(i)) {
        to = i;
        break;
      }
  } else if (key === "p") {
    for (let i = here - 1; i >= start; i--)
      if (wanted(i)) {
        to = i;
        break;
      }
  } else if (inside && state.at < 0 && key.startsWith("Arrow")) to = from;
  else if (inside && key === "ArrowRight") to = here + 1;
  else if (inside && key === "ArrowLeft") to = here - 1;
  else if (inside && (key === "ArrowUp" || key === "ArrowDown")) to = vertical(here, key === "ArrowDown");
  else if (inside && key === "Home") to = start;
  else if (inside && key === "End") to = end - 1;
  else if (inside && (key === "Enter" || key === " ")) to = from + Math.max(0, spans.indexOf(event.target));
  if (to !== null) {
    event.preventDefault();
    go(to);
  }
}

// A method is not compared with itself.
function offerSecond() {
  if (state.second === state.method) state.second = "";
  const others = facts.methods.filter(m => m.name !== state.method);
  options("second", [["", "nothing"], ...others.map(m => [m.name, m.name])]);
  $("second").value = state.second;
}
const options = (id, pairs) => put($(id), ...pairs.map(([value, text]) => make("option", text, { value })));
function prepare() {
  put(
    $("about"),
    ...facts.about.map(([name, value]) =>
      put(make("div"), make("dt", name, { className: "quiet" }), make("dd", value, { style: "margin: 0" })),
    ),
  );
  const names = facts.methods.map(m => m.name);
  $("frozen").textContent = facts.frozen;
  $("frozen").hidden = !facts.frozen;
  $("gaps").hidden = !arrays.gap;
  options(
    "method",
    names.map(n => [n, n]),
  );
  const shades = [
    ["", "nothing"],
    ...(Object.keys(arrays).some(n => n.startsWith("score ")) ? [["score", "score of the method"]] : []),
    ...(arrays.gap ? [["gap", "gap between student and teacher"]] : []),
    ...facts.measures.map(n => ["measure " + n, n]),
    ...(arrays.entropy ? [["entropy", "how unsure the student was, 0 to 1"]] : []),
  ];
  options("shade", shades);
  options(
    "which",
    answers.map((_, a) => [
      a,
      `${a + 1}${verdict(a) === "not graded" ? "" : `, ${verdict(a)}`}: ${brief(original(a), 80)}`,
    ]),
  );
  const distinct = [...new Set(answers.map(a => a.step))];
  $("steps").hidden = distinct.length < 2;
  options("step", [["", "all"], ...distinct.map(s => [s, s])]);
  const asked = new URLSearchParams(location.hash.slice(1));
  state.method = [asked.get("method"), facts.method].find(n => names.includes(n));
  state.second = names.includes(asked.get("second")) ? asked.get("second") : "";
  state.answer = Math.min(Math.max(0, (Number(asked.get("answer")) || 1) - 1), answers.length - 1);
  $("method").value = state.method;
  offerSecond();
  $("shade").value = state.shade = shades.length > 1 ? shades[1][0] : "";
  $("controls").hidden = Boolean(facts.frozen);
  const on = (id, name, change) => $(id).addEventListener(name, change);
  for (const id of ["method", "second", "look", "shade"])
    on(id, "change", () => {
      state[id] = $(id).value;
      if (id === "method") offerSecond();
      refresh();
    });
  on("gap", "input", () => {
    state.gap = Number($("gap").value);
    refresh();
  });
  on("budget", "input", () => setBudget($("budget").value));
  on("percent", "input", () => setBudget($("percent").value));
  on("percent", "change", () => {
    $("percent").value = state.percent;
  });
  on("which", "change", () => open(Number($("which").value)));
  on("before", "click", () => step(-1));
  on("after", "click", () => step(1));
  on("step", "change", () => {
    state.step = $("step").value;
    const chosen = included();
    if (!chosen.includes(state.answer)) open(chosen[0]);
    else drawAnswer();
    refresh();
  });
  on("search", "input", () => {
    state.query = $("search").value;
    refresh();
  });
  on("search", "keydown", event => {
    if (event.key === "Enter") step(1);
  });
  for (const n of [1, 2, 3]) {
    on("tab" + n, "click", () => show(n));
    on("tab" + n, "keydown", event => {
      const next = { ArrowRight: (n % 3) + 1, ArrowLeft: ((n + 1) % 3) + 1 }[event.key];
      if (next) {
        show(next);
        $("tab" + next).focus();
      }
    });
  }
  on("tokens", "click", event => {
    const n = spans.indexOf(event.target.closest(".t"));
    if (n >= 0) go(from + n);
  });
  document.addEventListener("keydown", keys);
  setBudget([asked.get("budget"), facts.budget].find(text => Number(text) > 0 && Number(text) <= 100));
}

async function start() {
  try {
    await unpack();
  } catch (error) {
    $("verdict").textContent =
      `This browser cannot read the page's data (${error.message}); a current version of any browser can.`;
    return;
  }
  if (!answers.length) {
    $("verdict").textContent = "There are no answers.";
    return;
  }
  prepare();
  open(state.answer);
  show(1);
  document.documentElement.dataset.ready = Math.round(performance.now());
}
start();
