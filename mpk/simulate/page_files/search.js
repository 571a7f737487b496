// Search by operator, layer, task or worker: which tasks match, how many, and where they stand in time.

const HELP = "operator, layer 12, task 4711, sm 3, or a regular expression";

// (text, graph) -> { tasks: Uint8Array [tasks] or null, error }. Words and numbers are tried first, then a regular expression, then plain text.
function matchTasks(text, graph) {
  const wanted = text.trim();
  if (wanted === "") return { tasks: null, error: "" };
  const tasks = new Uint8Array(graph.count);
  const number = /^(task|#|layer|l|sm|worker)\s*[:#]?\s*(\d+)$/i.exec(wanted);
  if (number) {
    const [, word, digits] = number, n = Number(digits);
    const key = word.toLowerCase();
    if (key === "task" || key === "#") {
      if (n < graph.count) tasks[n] = 1;
    } else if (key === "layer" || key === "l") {
      for (let t = 0; t < graph.count; ++t) tasks[t] = graph.operators[graph.tasks.op[t]].layer === n ? 1 : 0;
    } else for (let t = 0; t < graph.count; ++t) tasks[t] = graph.tasks.worker[t] === n ? 1 : 0;
    return { tasks, error: "" };
  }
  const exact = /^op:(.+)$/.exec(wanted);
  let test, error = "";
  if (exact) test = (op) => op.short === exact[1];
  else {
    try {
      const pattern = new RegExp(wanted.replace(/^\/(.*)\/$/, "$1"), "i");
      test = (op) => pattern.test(op.name) || pattern.test(op.kind);
    } catch {
      error = "not a regular expression, searched as plain text; ";
      test = (op) => op.name.toLowerCase().includes(wanted.toLowerCase());
    }
  }
  const hit = graph.operators.map(test);
  for (let t = 0; t < graph.count; ++t) tasks[t] = hit[graph.tasks.op[t]] ? 1 : 0;
  return { tasks, error };
}

// Where matches stand: one place for each run of an operator in a step (for each span where few tasks match), in order of time.
function placesOf(panel) {
  const { data, found, graph } = panel;
  const groups = new Map();
  let spans = 0, count = 0;
  for (let t = 0; t < found.length; ++t) count += found[t];
  const single = count <= 16, steps = panel.described.steps;
  for (const track of data.tracks) {
    if (track.role !== CONSUMER) continue;
    let step = 0;
    for (let i = track.first; i < track.stop; ++i) {
      const t = data.task[i];
      if (data.phase[i] !== RUN || t === NO_TASK || found[t] === 0) continue;
      ++spans;
      while (step < steps.length - 1 && data.begin[i] >= steps[step]) ++step;
      const key = single ? i : graph.tasks.op[t] * 65536 + step;
      const place = groups.get(key);
      if (place === undefined) groups.set(key, { panel, span: i, begin: data.begin[i], end: data.end[i] });
      else {
        if (data.begin[i] < place.begin) place.begin = data.begin[i], place.span = i;
        if (data.end[i] > place.end) place.end = data.end[i];
      }
    }
  }
  const operators = new Set();
  for (let t = 0; t < found.length; ++t) if (found[t]) operators.add(graph.tasks.op[t]);
  return { places: [...groups.values()].sort((a, b) => a.begin - b.begin), spans, tasks: count, operators: operators.size };
}

class Search {
  constructor(app) {
    this.app = app;
    this.input = document.getElementById("search");
    this.output = document.getElementById("found");
    this.places = [];
    this.at = -1;
    this.input.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.run(), 120);
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") {
        event.preventDefault();
        this.flush();
        this.step(event.shiftKey ? -1 : 1);
      } else if (event.key === "Escape") {
        event.preventDefault();
        this.set("");
        this.app.panels[0].rows.focus();
      }
    });
    document.getElementById("next").addEventListener("click", () => this.step(1));
    document.getElementById("previous").addEventListener("click", () => this.step(-1));
    this.input.title = HELP;
    this.run();
  }

  set(text) {
    this.input.value = text;
    this.run();
  }

  flush() {
    if (this.input.value !== this.text) this.run();
  }

  run() {
    clearTimeout(this.timer);
    this.text = this.input.value;
    this.at = -1;
    this.places = [];
    const counts = [];
    let error = "";
    for (const panel of this.app.panels) {
      const result = matchTasks(this.text, panel.graph);
      panel.found = result.tasks;
      error = result.error;
      if (panel.found === null) continue;
      const found = placesOf(panel);
      counts.push(found);
      this.places.push(...found.places);
    }
    this.places.sort((a, b) => a.panel.ns(a.begin) - b.panel.ns(b.begin));
    for (const id of ["next", "previous"]) document.getElementById(id).disabled = this.places.length === 0;
    this.summary = counts.length === 0 ? "" : error + (this.places.length === 0 ? "nothing found" : counts.map((c) =>
      `${plural(c.operators, "operator")}, ${plural(c.tasks, "task")}, ${plural(c.spans, "run")}`).join(" | "));
    this.output.textContent = this.summary;
    this.app.legend.mark(this.text);
    this.app.draw();
  }

  step(direction) {
    if (this.places.length === 0) return;
    this.at = this.at < 0 ? (direction > 0 ? this.nextInView() : this.places.length - 1) : (this.at + direction + this.places.length) % this.places.length;
    const { panel, span, begin, end } = this.places[this.at];
    const width = Math.max((panel.ns(end) - panel.ns(begin)) * 3, 40 * panel.tick, 200), middle = (panel.ns(begin) + panel.ns(end)) / 2;
    this.app.select(panel, span, false);
    this.app.setView(middle - width / 2, middle + width / 2);
    this.output.textContent = `${whole(this.at + 1)} of ${whole(this.places.length)}: ${panel.operator(span).name} at ${duration(begin * panel.tick)} \u00b7 ${this.summary}`;
  }

  // The first match from the left edge of the view on, so that "next" starts where one looks.
  nextInView() {
    const place = this.places.findIndex((p) => p.panel.ns(p.begin) >= this.app.view.begin);
    return Math.max(place, 0);
  }
}
