// What the page says in words and tables: critical numbers, legend, idle time by cause, time by operator.

function signed(value, words) {
  const text = words(Math.abs(value));
  return /[1-9]/.test(text) ? (value > 0 ? "+" : "\u2212") + text : text;  // nothing is neither more nor less
}

function showTitle() {
  const parts = manifest.timelines.map((t) => {
    const g = manifest.graphs[t.graph];
    const devices = t.all_devices > 1 ? ` \u00d7 ${t.all_devices}${t.devices.length < t.all_devices ? " (all alike, one is shown)" : ""}` : "";
    return `${t.label}: ${plural(t.steps, "step")} on ${g.target}${devices}, ${plural(t.workers, t.unit)}, ${whole(t.spans)} spans`;
  });
  document.getElementById("subtitle").textContent = parts.join(" \u00b7 ");
}

// Rows are timelines, and their difference where there are two.
function showFigures() {
  const floor = manifest.floor_ms, two = manifest.timelines.length === 2;
  const columns = [
    ["one step", (t) => t.step_ms, (v) => v.toFixed(3), "ms"],
    ["above the floor", (t) => (floor ? t.step_ms / floor : null), (v) => v.toFixed(2), "\u00d7"],
    ["workers in tasks", (t) => t.in_tasks, (v) => (100 * v).toFixed(1), "%"],
    ["running, not starved", (t) => t.utilisation, (v) => (100 * v).toFixed(1), "%"],
    ["read from memory", (t) => t.gb_s, (v) => (v >= 1000 ? v / 1000 : v).toFixed(2), (v) => (v >= 1000 ? "TB/s" : "GB/s")],
    ["bytes a step" + (manifest.timelines.some((t) => t.all_devices > 1) ? " and device" : ""), (t) => t.bytes, (v) => bytesText(v).split(" ")[0], (v) => bytesText(v).split(" ")[1]],
    ["sent to other devices", (t) => t.sent_bytes || null, (v) => bytesText(v).split(" ")[0], (v) => bytesText(v).split(" ")[1]],
  ].filter(([, value]) => manifest.timelines.some((t) => value(t) !== null));
  const box = document.getElementById("figures");
  box.style.gridTemplateColumns = `repeat(${columns.length + (two ? 1 : 0)}, max-content)`;
  if (two) box.append(element("span"));
  for (const [name] of columns) box.append(element("span", { class: "head" }, name === "above the floor" ? `of the floor, ${floor.toFixed(3)} ms` : name));
  for (const t of manifest.timelines) {
    if (two) box.append(element("span", { class: "name" }, t.label));
    for (const [, value, text, unit] of columns) {
      const v = value(t);
      box.append(v === null ? element("span", { class: "value" }, "\u2013")
        : element("span", { class: "value" }, text(v) + "\u2009", element("small", {}, typeof unit === "string" ? unit : unit(v))));
    }
  }
  if (!two) return;
  document.getElementById("reports").classList.add("two");
  const [a, b] = manifest.timelines, points = ["workers in tasks", "running, not starved"];
  box.append(element("span", { class: "name" }, "difference"));
  for (const [name, value] of columns) {
    const from = value(a), to = value(b);
    const words = from === null || to === null || from === 0 ? "\u2013"
      : points.includes(name) ? signed(100 * (to - from), (v) => v.toFixed(1) + " points") : signed((100 * (to - from)) / from, (v) => v.toFixed(1) + " %");
    box.append(element("span", { class: "value difference" }, words));
  }
}

// Colour of each short operator name: by time, so that what takes most is told apart best.
function colourIndices() {
  return new Map(manifest.operators.map((row, i) => [row.name, Math.min(i, KINDS - 1)]));
}

class Legend {
  constructor(app) {
    this.app = app;
    this.chips = new Map();
    const box = document.getElementById("legend"), indices = colourIndices();
    const total = manifest.operators.reduce((sum, row) => sum + (row.figures[0]?.task_us ?? 0), 0);
    for (const row of manifest.operators) {
      const share = total > 0 ? (row.figures[0]?.task_us ?? 0) / total : 0;
      const chip = element("button", { class: "chip", type: "button", "aria-pressed": "false", title: `${row.kind}: ${percent(share)} of the time in tasks; click to highlight`,
        onclick: () => app.search.set(chip.getAttribute("aria-pressed") === "true" ? "" : "op:" + row.name) },
      element("span", { class: "swatch", style: `background: var(--c${indices.get(row.name)})` }), row.name,
      row.kind === row.name || share < 0.001 ? null : element("small", {}, row.kind));
      this.chips.set("op:" + row.name, chip);
      box.append(chip);
    }
    const waits = element("span", { class: "waits" });
    manifest.phases.forEach((name, phase) => {
      if (phase === RUN || !manifest.timelines.some((t) => t.shares[name] > 0)) return;
      waits.append(element("span", { class: "chip" }, waitSwatch(phase), name));
    });
    box.append(waits);
  }

  mark(text) {
    for (const [query, chip] of this.chips) chip.setAttribute("aria-pressed", String(query === text.trim()));
  }
}

function waitSwatch(phase) {
  const hatch = phase === 2 || phase === 4 ? ` h${phase}` : "";
  return element("span", { class: "swatch wait" + hatch, style: `background-color: var(--w${phase})` });
}

function showIdle() {
  const box = document.getElementById("idle"), names = [...manifest.phases, manifest.not_traced];
  const [a, b] = manifest.timelines;
  for (const t of manifest.timelines) {
    const stack = element("div", { class: "stack", "aria-hidden": "true" });
    names.forEach((name, phase) => {
      if (t.shares[name] < 0.0005) return;
      const hatch = phase === 2 || phase === 4 ? `h${phase}` : "";
      stack.append(element("span", { class: phase === RUN ? "run" : hatch, title: `${name}: ${percent(t.shares[name])}`,
        style: `flex: ${t.shares[name]} 0 0` + (phase === RUN ? "" : `; background-color: var(--w${phase})`) }));
    });
    if (b) box.append(element("h3", {}, t.label));
    box.append(stack);
  }
  const head = element("tr", {}, element("th", {}, "cause"), ...manifest.timelines.flatMap((t) =>
    [element("th", { class: "first" }, b ? t.source : "share"), element("th", {}, "per step")]), b ? element("th", { class: "first" }, "difference") : null);
  const body = names.filter((name) => manifest.timelines.some((t) => t.shares[name] >= 0.00005)).map((name) => {
    const phase = names.indexOf(name);
    return element("tr", {}, element("td", {}, phase === RUN ? element("span", { class: "swatch", style: "background: var(--accent)" }) : waitSwatch(phase),
      phase === RUN ? "run tasks" : name),
    ...manifest.timelines.flatMap((t) => [element("td", { class: "first" }, percent(t.shares[name], 2)), element("td", {}, duration(t.shares[name] * t.step_ms * 1e6))]),
    b ? element("td", { class: "first" }, signed(b.shares[name] * b.step_ms * 1e6 - a.shares[name] * a.step_ms * 1e6, duration)) : null);
  });
  box.append(element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
  box.append(element("p", { class: "note" }, "Of an average worker. \u201cno span\u201d: nothing was recorded, because no task is left or the trace does not see it."
    + (manifest.timelines.some((t) => t.utilisation === null) ? " What a task waits for its weights or for other devices is part of its run where the trace does not tell it"
      + (b ? `: compare the time in tasks, ${manifest.timelines.map((t) => `${percent(t.in_tasks)} ${t.label}`).join(" and ")}.` : ".") : "")));
}

function showOperators(app) {
  const table = document.getElementById("operators"), two = manifest.timelines.length === 2, indices = colourIndices();
  document.getElementById("operators-note").textContent = "Microseconds of a step, all layers together, of an average worker. in tasks: from the moment their events have "
    + "come to their end; starved: the part of it that waits for weights or other devices, where that is known; before: waits for events. active: while at least one worker is in a task "
    + "of it; GB/s: weights over that time (those fetched ahead count where they are used). Click a row to find it above.";
  const starved = manifest.timelines.some((t) => t.utilisation !== null);
  const heads = ["in tasks", ...(starved ? ["starved"] : []), "before", "active", "GB/s"];
  const sources = element("tr", { class: "source" }, element("th", { colspan: 3 }), ...manifest.timelines.map((t) => element("th", { class: "first", colspan: heads.length }, t.label)),
    two ? element("th", { class: "first", colspan: 2 }, "difference in tasks") : null);
  const names = element("tr", {}, element("th", {}, "operator"), element("th", { class: "left" }, "kind"), element("th", {}, "tasks"),
    ...manifest.timelines.flatMap(() => heads.map((h, i) => element("th", { class: i === 0 ? "first" : null }, h))),
    ...(two ? [element("th", { class: "first" }, "\u00b5s"), element("th", {}, "%")] : []));
  const number = (v) => v.toFixed(v >= 100 ? 1 : 2);
  const difference = (a, b) => {
    if (a === null || b === null) return [element("td", { class: "first" }, "\u2013"), element("td", {}, "\u2013")];
    const d = b - a, style = Math.abs(d) < 0.005 ? "" : d > 0 ? " more" : " less";
    return [element("td", { class: "first" + style }, signed(d, number)), element("td", { class: style.trim() }, a > 0 ? signed((100 * d) / a, (v) => v.toFixed(1)) : "\u2013")];
  };
  const rows = manifest.operators.map((row) => element("tr", { onclick: () => app.search.set("op:" + row.name) },
    element("td", {}, element("span", { class: "swatch", style: `background: var(--c${indices.get(row.name)})` }),
      element("button", { type: "button", "aria-label": `find ${row.name}` }, row.name)),
    element("td", { class: "left" }, row.kind), element("td", {}, whole(row.figures.find((f) => f !== null).tasks)),
    ...row.figures.flatMap((f, i) => (f === null ? heads.map((_, n) => element("td", { class: n === 0 ? "first" : null }, "\u2013")) : [
      element("td", { class: "first" }, number(f.task_us)),
      ...(starved ? [element("td", {}, manifest.timelines[i].utilisation === null ? "\u2013" : number(f.task_us - f.run_us))] : []),
      element("td", { title: Object.entries(f.waits).map(([cause, us]) => `${cause}: ${number(us)} \u00b5s`).join("\n") }, number(f.before_us)),
      element("td", {}, number(f.active_us)), element("td", {}, f.bytes ? whole(Math.round(f.gb_s)) : "")])),
    ...(two ? difference(row.figures[0]?.task_us ?? null, row.figures[1]?.task_us ?? null) : [])));
  const sum = (i, key) => manifest.operators.reduce((total, row) => total + (row.figures[i]?.[key] ?? 0), 0);
  const foot = element("tr", {}, element("td", {}, "all"), element("td"), element("td"),
    ...manifest.timelines.flatMap((_, i) => [element("td", { class: "first" }, number(sum(i, "task_us"))),
      ...(starved ? [element("td", {}, manifest.timelines[i].utilisation === null ? "\u2013" : number(sum(i, "task_us") - sum(i, "run_us")))] : []),
      element("td", {}, number(sum(i, "before_us"))), element("td"), element("td")]),
    ...(two ? difference(sum(0, "task_us"), sum(1, "task_us")) : []));
  table.append(element("thead", {}, two ? sources : null, names), element("tbody", {}, ...rows), element("tfoot", {}, foot));
}
