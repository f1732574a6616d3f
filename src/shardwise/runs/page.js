// Turns what runs say into elements, by their text alone, and draws their curves with uPlot.
(() => {
  "use strict";
  const main = document.getElementById("page");
  const updates = main.dataset.updates;
  const data = JSON.parse(document.getElementById("data").textContent);
  let runs = data.runs;

  // -- elements ----------------------------------------------------------------------------------

  const TURNS = /[\u202a-\u202e\u2066-\u2069]/g;  // they would turn around what follows

  function h(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "style") Object.assign(element.style, value);
      else element.setAttribute(name, value);
    }
    for (const child of children.flat()) if (child !== null && child !== undefined && child !== "") element.append(typeof child === "string" ? child.replace(TURNS, "\ufffd") : child);
    return element;
  }

  function table(heads, rows) {
    const body = rows.map(row => h("tr", {},
      row.map((cell, at) => h("td", { "data-head": heads[at], ...(cell instanceof Element || String(cell).length < 60 ? {} : { class: "text" }) },
        cell instanceof Element ? cell : String(cell)))));
    return h("div", { class: "scroll cells", tabindex: 0, role: "region", "aria-label": "table" },
      h("table", {}, h("thead", {}, h("tr", {}, heads.map(head => h("th", { scope: "col" }, head)))), h("tbody", {}, body)));
  }

  // -- numbers and times -------------------------------------------------------------------------

  // A run may name a value "constructor". Where NaN or an infinity was, there is null.
  const own = (object, name) => Object.hasOwn(object, name) ? object[name] : undefined;
  const isNumber = value => typeof value === "number" && Number.isFinite(value);
  const grouped = value => isNumber(value) ? value.toLocaleString("en-US", { maximumFractionDigits: 0 }) : "–";

  function brief(value) {
    if (!isNumber(value)) return "–";
    const size = Math.abs(value);
    if (size >= 10000) return grouped(value);
    if (size >= 0.0001 || size === 0) return String(Number(value.toPrecision(4)));
    return value.toExponential(2);
  }

  const figure = (values, name) => own(values, name) === null ? "not finite" : brief(own(values, name));

  function scaled(value, step, units) {
    let unit = 0;
    while (Math.abs(value) >= step && unit < units.length - 1) { value /= step; unit += 1; }
    return `${unit && Math.abs(value) < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`.trim();
  }

  const bytes = value => isNumber(value) ? scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]) : "–";
  const mebibytes = value => isNumber(value) ? bytes(value * 2 ** 20) : "–";
  const count = value => isNumber(value) ? scaled(value, 1000, ["", "k", "M", "B", "T"]) : "–";
  const percent = value => isNumber(value) ? `${(100 * value).toFixed(1)}%` : "–";

  function duration(seconds) {
    if (!isNumber(seconds)) return "–";
    const s = Math.max(0, Math.round(seconds));
    if (s < 60) return `${s} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
    if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;
    return `${Math.floor(s / 86400)} d ${Math.floor(s % 86400 / 3600)} h`;
  }

  function moment(value) {
    const time = new Date(isNumber(value) ? value * 1000 : value);
    return Number.isNaN(time.getTime()) ? "–" : time.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
  }

  const words = value => value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value);
  const plural = (n, noun) => `${grouped(n)} ${noun}${n === 1 ? "" : "s"}`;

  // -- what a run says ---------------------------------------------------------------------------

  const last = items => items.length ? items[items.length - 1] : {};
  const session = run => last(run.sessions);
  const speed = run => Object.keys(run.curves.values).find(name => name.endsWith("_per_s"));
  const several = () => runs.length > 1;

  const STATES = {
    running: "running", finished: "finished", stopped: "stopped", failed: "failed",
    lost: "stopped without an end", unknown: "state unknown",
  };

  function ranksOf(run) {
    const s = session(run), mesh = s.mesh && typeof s.mesh === "object" ? Object.entries(s.mesh).map(([k, v]) => `${k}=${v}`).join(", ") : "";
    return [isNumber(s.world_size) && plural(s.world_size, "rank"), isNumber(s.hosts) && s.hosts > 1 && plural(s.hosts, "host"),
      s.device, mesh, s.transport].filter(each => typeof each === "string" && each).join(" · ");
  }

  function peakOf(plan) {  // bytes of the rank with the highest peak
    const peaks = Array.isArray(plan.ranks) ? plan.ranks.map(rank => rank && rank.peak).filter(isNumber) : [];
    return peaks.length ? Math.max(...peaks) : null;
  }

  // -- sections ----------------------------------------------------------------------------------

  const SECTIONS = {
    head: () => several() ? headOfAll() : headOf(runs[0]),
    problems: () => {
      const found = runs.flatMap(run => run.problems.map(text => several() ? `${run.name}: ${text}` : text));
      const lost = runs.flatMap(run => Object.entries(run.curves.not_finite).map(([name, [steps, first]]) =>
        `${several() ? `${run.name}: ` : ""}${name} in ${plural(steps, "step")}, first in step ${grouped(first)}`));
      const block = (title, texts) => texts.length ? h("div", { class: "problems" }, h("b", {}, title), h("ul", {}, texts.map(text => h("li", {}, text)))) : null;
      return found.length + lost.length ? h("div", {}, block("Could not be read in full", found), block("NaN or infinite", lost)) : null;
    },
    tiles: () => several() ? null : tiles(runs[0]),
    charts: null,  // drawn by itself: uPlot keeps its state
    ranks: () => each("Ranks", run => run.ranks.length ? ranks(run) : null),
    frames: () => each("Layout and timeline", run => run.frames && run.frames.length ? h("div", {}, run.frames.map(frame)) : null),
    sessions: () => each("Sessions", run => run.sessions.length ? sessions(run) : null),
    checkpoints: () => each("Checkpoints", run => run.checkpoints.length ? table(["step", "size", "files", "written", ""],
      run.checkpoints.map(c => [grouped(c.step), bytes(c.bytes), c.files, moment(c.written), c.best ? "best" : ""])) : null),
    samples: () => each("Samples", run => run.samples.length + run.images.length ? h("div", {},
      run.samples.map(s => h("details", { open: "" }, h("summary", {}, s.name), h("pre", {}, s.text))),
      run.images.map(i => h("details", { open: "" }, h("summary", {}, i.name), h("img", { alt: i.name, src: `data:image/png;base64,${i.data}` })))) : null),
    config: () => several() ? differences() : configuration(runs[0]),
  };

  function each(title, make) {
    const made = runs.map(run => [run, make(run)]).filter(([, element]) => element);
    if (!made.length) return null;
    return h("div", {}, h("h2", {}, title), made.map(([run, element]) =>
      several() ? h("details", {}, h("summary", {}, key(run), run.name), element) : element));
  }

  function key(run) {
    return h("span", { class: "key", style: { background: `var(--c${runs.indexOf(run) % 8})` } });
  }

  const state = run => h("span", { class: `state ${own(STATES, run.state) ? run.state : "unknown"}` }, own(STATES, run.state) || run.state);

  function headOf(run) {
    const s = session(run), done = run.latest.step || 0, asked = s.steps_asked_for;
    const about = [run.recipe && `train ${run.recipe}`, run.model, isNumber(run.parameters) && `${count(run.parameters)} parameters`, ranksOf(run)];
    const error = s.error || (s.signal ? `stopped by signal ${s.signal}` : "");
    const left = run.state === "running" && isNumber(run.latest.eta_s) ? `, ${duration(run.latest.eta_s)} left` : "";
    return h("header", {}, h("h1", {}, run.name), state(run),
      h("p", {}, about.filter(Boolean).join(" · ")),
      run.data ? h("p", { class: "soft" }, run.data) : null,
      error ? h("pre", { class: "failed" }, error) : null,
      isNumber(asked) && asked > 0 ? h("div", { class: "bar", role: "progressbar", "aria-valuenow": done, "aria-valuemax": asked, "aria-label": "steps" },
        h("i", { style: { width: `${Math.min(100, 100 * done / asked)}%` } })) : null,
      h("p", { class: "soft" }, isNumber(asked) ? `step ${grouped(done)} of ${grouped(asked)}${left}` : `step ${grouped(done)}${left}`,
        s.started ? `; started ${moment(s.started)}` : "", s.ended ? `, ended ${moment(s.ended)}` : ""),
      isNumber(data.written) && run.state === "running" ? h("p", { class: "soft" }, `As of ${moment(data.written)}. The training writes this page again every ${duration(data.every)}.`) : null,
      isNumber(data.written) && run.state === "lost" ? h("p", { class: "soft" }, `As of ${moment(data.written)}. The training has not written this page since: it was killed, or this is a copy.`) : null);
  }

  function headOfAll() {
    const rows = runs.map(run => {
      const v = run.curves.values, s = speed(run);
      return [h("span", {}, key(run), run.name), state(run), run.model, ranksOf(run), grouped(run.latest.step || 0),
        figure(run.latest, "loss"), brief(lowest(v.validation_loss)), s ? `${brief(run.latest[s])} ${s.replace("_per_s", "/s")}` : "–",
        mebibytes(run.latest.memory_mib)];
    });
    return h("header", {}, h("h1", {}, plural(runs.length, "run")),
      table(["run", "", "model", "ranks", "step", "loss", "best validation loss", "speed", "memory"], rows));
  }

  function lowest(curve) {
    const found = curve ? (curve.low || curve.mean).filter(isNumber) : [];
    return found.length ? Math.min(...found) : null;
  }

  // Resident memory of a CPU has the interpreter and its libraries in it, too.
  const isProcess = run => session(run).device === "cpu";
  const planned = run => isProcess(run) ? "tensors in the plan" : "plan";

  function tiles(run) {
    const l = run.latest, s = speed(run), peak = peakOf(run.plan), shown = [];
    const add = (label, text) => shown.push(h("div", { class: "tile" }, h("span", {}, label), h("b", {}, text)));
    add("loss", figure(l, "loss"));
    if ("validation_loss" in l) add("validation loss", figure(l, "validation_loss"));
    if (s) add(s.replace("_per_s", "/s"), brief(l[s]));
    if (isNumber(l.mfu)) add("MFU", percent(l.mfu));
    if (isNumber(l.memory_mib)) add(peak ? `memory, ${planned(run)} ${bytes(peak)}` : "memory of a rank", mebibytes(l.memory_mib));
    if ("grad_norm" in l) add("gradient norm", figure(l, "grad_norm"));
    add("learning rate", figure(l, "lr"));
    if (isNumber(l.epoch)) add("epochs", brief(l.epoch));
    return h("div", { class: "tiles" }, shown);
  }

  function sessions(run) {
    return table(["started", "ended", "result", "lost before", "from step", "ranks", "host", "versions", "command"], run.sessions.slice().reverse().map(s => {
      const host = s.host && typeof s.host === "object" ? s.host : {}, versions = s.versions && typeof s.versions === "object" ? s.versions : {};
      const isOver = s.status !== "running" || (s === session(run) && run.state === "running");
      const result = isOver ? s.status : STATES.lost;
      return [moment(s.started), s.ended ? moment(s.ended) : "–", [result, s.error].filter(Boolean).map(words).join(": "), s.lost ? words(s.lost) : "–", words(s.from_step), words(s.world_size),
        words(host.name), Object.entries(versions).map(([name, version]) => `${name} ${words(version)}`).join(", "), words(s.command)];
    }));
  }

  function ranks(run) {
    const now = last(run.ranks), names = session(run).host_names, size = session(run).local_size;
    const host = rank => Array.isArray(names) && isNumber(size) ? words(names[Math.floor(rank / size)]) : "";
    const busy = now.busy.slice().sort((a, b) => a - b), median = busy[Math.floor((busy.length - 1) / 2)];
    const most = Math.max(now.seconds, ...now.busy, 1e-9), slow = i => now.busy[i] > 1.1 * median && now.busy[i] === busy[busy.length - 1];
    const meter = i => h("div", { class: "meter", title: "of a step: busy, of which batches were waited for" },
      h("i", { style: { width: `${100 * now.busy[i] / most}%`, background: slow(i) ? "var(--c1)" : "var(--c0)" } }),
      h("i", { style: { width: `${100 * now.data[i] / most}%`, background: "var(--c4)" } }));
    const at = now.ranks.map((_, i) => i).sort((a, b) => now.ranks.length > 64 ? now.busy[b] - now.busy[a] : a - b).slice(0, 64);
    const rows = at.map(i => [grouped(now.ranks[i]), host(now.ranks[i]), seconds(now.busy[i]), meter(i), seconds(now.data[i]),
      seconds(Math.max(0, now.seconds - now.busy[i])), mebibytes(now.memory_mib[i]), slow(i) ? h("span", { class: "failed" }, `slowest, ${(now.busy[i] / median).toFixed(2)} x the median`) : ""]);
    return h("div", {}, h("p", { class: "soft" }, `Mean of the steps up to ${grouped(now.step)}; ${seconds(now.seconds)} a step. A rank that waits less than others is what they wait for.` +
      (at.length < now.world_size ? ` The ${at.length} busiest of ${plural(now.world_size, "rank")}.` : "")),
      table(["rank", "host", "busy", "", "data", "waiting", "peak memory", ""], rows));
  }

  const seconds = value => !isNumber(value) ? "–" : value < 1 ? `${brief(Number((1000 * value).toPrecision(3)))} ms` : `${brief(value)} s`;

  function frame(page) {
    const details = h("details", {}, h("summary", {}, page.title));
    // Only when it is opened: a page may be large. Sandboxed: it cannot reach this page, and leaves it in new tabs alone.
    const sandbox = "allow-scripts allow-popups allow-popups-to-escape-sandbox";
    details.addEventListener("toggle", () => {
      if (details.open && !details.querySelector("iframe")) {
        const srcdoc = page.html.replaceAll('href="#', 'href="about:srcdoc#');  // else within this page
        details.append(h("iframe", { sandbox, title: page.title, srcdoc }));
      }
    });
    return details;
  }

  function configuration(run) {
    const rows = Object.entries(run.config).map(([name, value]) => [name, words(value)]);
    if (!rows.length && !run.options) return null;
    return h("div", {}, h("h2", {}, "Configuration"),
      run.options ? h("details", {}, h("summary", {}, "config.yaml, for --config"), h("pre", {}, run.options)) : null,
      rows.length ? h("details", {}, h("summary", {}, `all ${rows.length} settings`), table(["setting", "value"], rows)) : null);
  }

  function differences() {
    const names = [...new Set(runs.flatMap(run => Object.keys(run.config)))];
    const values = name => runs.map(run => Object.hasOwn(run.config, name) ? words(run.config[name]) : "–");
    const differing = names.filter(name => new Set(values(name)).size > 1), same = names.filter(name => !differing.includes(name));
    const heads = ["setting", ...runs.map(run => run.name)], rows = of => of.map(name => [name, ...values(name)]);
    return h("div", {}, h("h2", {}, "Configuration"), h("p", {}, `${differing.length} of ${names.length} settings differ.`),
      differing.length ? table(heads, rows(differing)) : null,
      same.length ? h("details", {}, h("summary", {}, `${same.length} settings are the same`), table(heads.slice(0, 2), same.map(name => [name, values(name)[0]]))) : null);
  }

  // -- charts ------------------------------------------------------------------------------------

  const TITLES = { loss: "Loss", lr: "Learning rate", grad_norm: "Gradient norm", memory_mib: "Memory of the largest rank", mfu: "Model FLOPs utilization", validation_loss: "Validation loss" };
  const SHOWN = { memory_mib: mebibytes, mfu: percent };
  const nameOf = name => own(TITLES, name) || (name.endsWith("_per_s") ? `${name[0].toUpperCase()}${name.slice(1, -6)} per second` : name);
  const titleOf = name => name === "memory_mib" && !several() && isProcess(runs[0]) && peakOf(runs[0].plan) ? "Memory of the largest process, and of its tensors in the plan" : nameOf(name);
  const charts = new Map();  // name -> { root, plot, shape, log, zoomed }
  const color = (name, alpha = 1) => {
    const value = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    return alpha === 1 ? value : value + Math.round(alpha * 255).toString(16).padStart(2, "0");
  };

  function chartNames() {
    const found = [...new Set(runs.flatMap(run => Object.keys(run.curves.values)))];
    const known = ["loss", "lr", "grad_norm"];
    const order = name => known.includes(name) ? known.indexOf(name) : name.endsWith("_per_s") ? 3 : name === "mfu" ? 4 : name === "memory_mib" ? 5 : 6;
    return found.filter(name => name !== "validation_loss" || !found.includes("loss"))
      .map((name, at) => [order(name), at, name]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(each => each[2]);
  }

  function smooth(values) {  // over neighbors on both sides, so that it does not lag
    const reach = Math.min(15, Math.floor(values.length / 12));
    if (reach < 2) return null;
    const sums = [0], counts = [0];
    for (const v of values) { sums.push(sums[sums.length - 1] + (v ?? 0)); counts.push(counts[counts.length - 1] + (v === null ? 0 : 1)); }
    return values.map((v, i) => {
      if (v === null) return null;
      const near = Math.min(reach, i, values.length - 1 - i), from = i - near, to = i + near + 1;
      return (sums[to] - sums[from]) / (counts[to] - counts[from]);
    });
  }

  function linesOf(name) {  // [{ label, steps, values, color, kind }]
    const lines = [];
    runs.forEach((run, at) => {
      const steps = run.curves.steps, curve = own(run.curves.values, name), tint = `--c${several() ? at % 8 : 0}`;
      const label = several() ? run.name : nameOf(name).toLowerCase();
      if (curve) {
        const even = ["loss", "grad_norm"].includes(name) || name.endsWith("_per_s") ? smooth(curve.mean) : null;
        const dots = curve.mean.filter(v => v !== null).length * 4 < steps.length;
        if (curve.low && !several()) {
          lines.push({ label: "highest", steps, values: curve.high, tint, kind: "edge" }, { label: "lowest", steps, values: curve.low, tint, kind: "edge" });
        } else if (even && runs.length <= 3) lines.push({ label: several() ? `${label}, every step` : "every step", steps, values: curve.mean, tint, kind: "faint" });
        lines.push({ label: even && !several() ? "smoothed" : label, steps, values: even || curve.mean, tint, kind: dots ? "dots" : "line" });
      }
      const valid = name === "loss" ? run.curves.values.validation_loss : null;
      if (valid) lines.push({ label: several() ? `${label}, validation` : "validation", steps, values: valid.mean, tint: several() ? tint : "--c1", kind: "dots" });
      const peak = name === "memory_mib" && !several() ? peakOf(run.plan) : null;
      if (peak) lines.push({ label: planned(run), steps, values: steps.map(() => peak / 2 ** 20), tint: "--c4", kind: "dashed" });
    });
    return lines;
  }

  const WHOLE = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map(each => each * 10 ** power)).flat();  // between ticks of steps

  function optionsOf(name, lines, chart) {
    const shown = own(SHOWN, name) || brief;
    const axis = { stroke: color("--soft"), grid: { stroke: color("--grid"), width: 1 }, ticks: { stroke: color("--grid"), width: 1 }, font: "12px system-ui, sans-serif" };
    const series = lines.map(line => {
      const base = { label: line.label, spanGaps: true, points: { show: false }, value: (u, v, at, i) => shown(i === null ? newest(u.data[at]) : v) };
      switch (line.kind) {
        case "edge": return { ...base, stroke: "transparent", width: 0 };
        case "faint": return { ...base, stroke: color(line.tint, 0.35), width: 1 };
        case "dots": return { ...base, stroke: color(line.tint), width: 1.5, points: { show: true, size: 6, fill: color(line.tint) } };
        case "dashed": return { ...base, stroke: color(line.tint), width: 1.5, dash: [6, 4] };
        default: return { ...base, stroke: color(line.tint), width: 2 };
      }
    });
    const edge = lines.findIndex(line => line.kind === "edge");
    return {
      width: Math.max(200, chart.box.clientWidth), height: 230,
      scales: { x: { time: false }, y: chart.log ? { distr: 3 } : name === "memory_mib" || name.endsWith("_per_s") || name === "mfu" ? { range: (u, low, high) => uPlot.rangeNum(Math.min(0, low), high, 0.1, true) } : {} },
      axes: [{ ...axis, incrs: WHOLE }, { ...axis, size: (u, ticks) => 24 + 7 * Math.max(...(ticks || [""]).map(tick => tick.length)), values: (u, ticks) => ticks.map(v => v === null ? "" : name === "memory_mib" ? mebibytes(v) : name === "mfu" ? percent(v) : Math.abs(v) >= 10000 ? count(v) : brief(v)) }],
      series: [{ label: "step", value: (u, v, at, i) => grouped(i === null ? newest(u.data[0]) : v) }, ...series],
      bands: edge < 0 ? [] : [{ series: [edge + 1, edge + 2], fill: color(lines[edge].tint, 0.22) }],
      cursor: { sync: { key: "steps" }, y: false, drag: { x: true, y: false } },
      hooks: { setSelect: [u => { if (u.select.width > 0) chart.zoomed = true; }] },
    };
  }

  const newest = values => values.findLast(isNumber);  // what the legend shows while nobody points

  function dataOf(lines) {
    const tables = lines.map(line => [line.steps, line.values]);
    return tables.every(t => t[0] === tables[0][0]) ? [tables[0][0], ...tables.map(t => t[1])] : uPlot.join(tables);
  }

  function drawChart(name, chart, anew) {
    const lines = linesOf(name), shape = JSON.stringify([lines.map(line => [line.label, line.tint, line.kind]), chart.log]);
    if (!lines.length) return;
    if (anew || !chart.plot || shape !== chart.shape) {
      if (chart.plot) chart.plot.destroy();
      chart.shape = shape;
      chart.zoomed = false;
      chart.plot = new uPlot(optionsOf(name, lines, chart), dataOf(lines), chart.box);
      chart.plot.over.addEventListener("dblclick", () => { chart.zoomed = false; });
    } else {
      chart.plot.setData(dataOf(lines), !chart.zoomed);
      if (chart.zoomed) chart.plot.redraw();
    }
  }

  function drawCharts(box, anew) {
    const names = chartNames();
    for (const [name, chart] of charts) if (!names.includes(name)) { if (chart.plot) chart.plot.destroy(); chart.root.remove(); charts.delete(name); }
    for (const name of names) {
      if (!charts.has(name)) {
        const chart = { log: false, zoomed: false, box: h("div", {}) };
        const toggle = h("input", { type: "checkbox" });
        toggle.addEventListener("change", () => { chart.log = toggle.checked; drawChart(name, chart, true); });
        const title = titleOf(name);
        chart.root = h("div", { class: "chart", "data-name": name }, h("h3", {}, title, ["loss", "grad_norm"].includes(name) ? h("label", {}, toggle, " log") : null), chart.box);
        charts.set(name, chart);
      }
    }
    // In their order, and all of them before the first is drawn: they share the width.
    const roots = names.map(name => charts.get(name).root);
    if (roots.some((root, at) => box.children[at] !== root)) box.replaceChildren(...roots);
    for (const name of names) drawChart(name, charts.get(name), anew);
    fit();
  }

  function fit() {  // each chart into its card, which may have been narrower or hidden when it was drawn
    for (const { plot, box } of charts.values()) {
      const width = Math.max(200, box.clientWidth);
      if (plot && box.clientWidth && plot.width !== width) plot.setSize({ width, height: 230 });
    }
  }

  // -- the page ----------------------------------------------------------------------------------

  const shown = {};  // section -> [its element, what it was made from]

  function render() {
    const now = JSON.stringify(runs.map(run => ({ ...run, curves: null })));
    for (const [name, make] of Object.entries(SECTIONS)) {
      if (!shown[name]) { shown[name] = h("section", { id: name }); main.append(shown[name]); }
      if (!make || render.before === now) continue;
      const made = make(), markup = made ? made.outerHTML : "";
      if (shown[name].markup === markup) continue;  // what a reader has opened stays open
      shown[name].markup = markup;
      shown[name].replaceChildren(...(made ? [made] : []));
    }
    render.before = now;
    shown.charts.className = "charts";
    drawCharts(shown.charts, false);
  }

  function redraw() { drawCharts(shown.charts, true); }

  new ResizeObserver(fit).observe(main);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  // A training that was killed cannot say so. But it would have written this page again.
  const isOverdue = isNumber(data.written) && Date.now() / 1000 > data.written + 3 * data.every + 60;
  if (isOverdue) runs.filter(run => run.state === "running").forEach(run => { run.state = "lost"; });

  main.replaceChildren();
  render();
  const isUnderWay = () => runs.some(run => run.state === "running");

  if (updates === "reload" && isUnderWay()) setTimeout(() => location.reload(), 15000);
  if (updates === "fetch") {
    let tag = "";
    const poll = async () => {
      try {
        const answer = await fetch("data.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
        if (answer.status === 200) {
          tag = answer.headers.get("ETag") || "";
          const before = runs;
          runs = (await answer.json()).runs.map((run, at) => ({ ...run, frames: run.frames || before[at].frames }));
          render();
        }
        document.body.removeAttribute("data-lost");
      } catch { document.body.dataset.lost = ""; }  // the server has gone; the page stays
      setTimeout(poll, document.hidden ? 10000 : 2000);
    };
    setTimeout(poll, 2000);
  }
})();
