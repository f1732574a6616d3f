// Draws one step in detail: time to the right, ranks from the top down, the prediction first.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("chart");
  if (!canvas) return;
  const about = document.getElementById("about"), select = document.getElementById("step");
  const ROW = 15, GAP = 3, HEAD = 18, TOP = 22, SMALL = "11px system-ui, sans-serif";
  const color = {
    forward: "forward", backward: "backward", optimizer: "optimizer", unshard: "runtime",
    reduce: "runtime", copy: "copy", wait: "wait", peer: "peer", all_gather: "gather",
    reduce_scatter: "reduce", all_reduce: "reduce",
  };
  let step, from, until, drawn = [], left = 90;

  const style = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name);
  const clock = us => us >= 1e6 ? (us / 1e6).toFixed(3) + " s"
    : us >= 1000 ? (us / 1000).toFixed(us >= 1e5 ? 1 : 2) + " ms" : Math.round(us) + " µs";
  const tickText = us => us ? clock(us).replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " ") : "0";

  function choose(number) {
    step = data.steps.find(s => s.number === number) || data.steps[data.steps.length - 1];
    select.value = step.number;
    whole();
  }

  function whole() { from = 0; until = Math.max(step.length, 1); draw(); }

  function draw() {
    const width = canvas.parentElement.clientWidth, scale = window.devicePixelRatio || 1;
    const pen = canvas.getContext("2d");
    pen.font = SMALL;
    const titles = step.groups.flatMap(group => group.rows.map(row => pen.measureText(row[0]).width));
    left = Math.min(width / 3, Math.max(0, ...titles) + 14);
    let height = TOP;
    for (const group of step.groups) height += HEAD + group.rows.length * (ROW + GAP) + 6;
    canvas.width = width * scale; canvas.height = height * scale;
    canvas.style.width = width + "px"; canvas.style.height = height + "px";
    pen.scale(scale, scale);
    pen.font = SMALL; pen.textBaseline = "middle";
    const per = (width - left) / (until - from), text = style("text"), soft = style("soft");
    const rule = style("rule"), label = style("label");
    const colors = Object.fromEntries(
      [...Object.values(color), "other"].map(name => [name, style(name)]));
    drawn = [];
    ruler(pen, width, height, per, soft, rule);
    let y = TOP;
    for (const group of step.groups) {
      pen.fillStyle = text; pen.font = "600 12px system-ui, sans-serif";
      pen.fillText(group.title, 6, y + HEAD / 2);
      pen.font = SMALL;
      y += HEAD;
      let before = "";
      for (const [title, spans] of group.rows) {
        pen.fillStyle = soft;
        if (title !== before) pen.fillText(title, 6, y + ROW / 2, left - 12);
        before = title;
        pen.save(); pen.beginPath(); pen.rect(left, y, width - left, ROW); pen.clip();
        for (let i = 0; i < spans.length; i++) {
          const span = spans[i], [kind, name, begin, length] = span;
          const holds = i + 1 < spans.length && spans[i + 1][2] < begin + length;
          const x = left + (begin - from) * per, w = Math.max(length * per, 0.6);
          if (x > width || x + w < left) continue;
          pen.globalAlpha = holds ? 0.45 : 1;  // others lie on it
          pen.fillStyle = colors[color[kind] || "other"];
          pen.fillRect(x, y, Math.max(w - 0.4, 0.6), ROW);
          pen.globalAlpha = 1;
          drawn.push([x, y, w, span, group.title]);
          if (w > 12 && !holds) {
            pen.fillStyle = label;
            const at = Math.max(x, left) + 3;
            pen.fillText(fitted(pen, data.names[name], x + w - at - 3), at, y + ROW / 2 + 0.5);
          }
        }
        pen.restore();
        y += ROW + GAP;
      }
      y += 6;
    }
  }

  function ruler(pen, width, height, per, soft, rule) {
    const wanted = (until - from) / Math.max(2, (width - left) / 110);
    const power = 10 ** Math.floor(Math.log10(wanted));
    const tick = [1, 2, 5, 10].map(n => n * power).find(n => n >= wanted);
    for (let at = Math.ceil(from / tick) * tick; at <= until; at += tick) {
      const x = left + (at - from) * per;
      pen.fillStyle = rule; pen.fillRect(x, TOP - 4, 1, height);
      pen.fillStyle = soft;
      if (x + 60 < width) pen.fillText(tickText(at), x + 3, TOP / 2);
    }
  }

  function fitted(pen, name, room) {  // the end of a name says which layer it is: layers.2, or 2
    const fits = text => pen.measureText(text).width <= room;
    while (!fits(name) && name.includes(".")) name = name.slice(name.indexOf(".") + 1);
    return fits(name) ? name : "";
  }

  function zoom(factor, center) {
    const length = Math.min(Math.max((until - from) * factor, 20), step.length || 1);
    const share = (center - from) / (until - from);
    from = Math.max(0, Math.min(center - length * share, step.length - length));
    until = from + length;
    draw();
  }

  function move(by) {
    const length = until - from;
    from = Math.max(0, Math.min(from + by, step.length - length));
    until = from + length;
    draw();
  }

  const timeAt = x => from + (x - left) / (canvas.clientWidth - left) * (until - from);

  let held = null;
  canvas.addEventListener("pointerdown", e => {
    held = e.offsetX; canvas.setPointerCapture(e.pointerId); tell(e);
  });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointercancel", () => { held = null; });
  canvas.addEventListener("pointermove", e => {
    if (held !== null && Math.abs(e.offsetX - held) > 2) {
      move((held - e.offsetX) / (canvas.clientWidth - left) * (until - from));
      held = e.offsetX;
    } else tell(e);
  });
  canvas.addEventListener("wheel", e => {
    if (!(e.ctrlKey || e.metaKey)) return;  // otherwise the page scrolls
    e.preventDefault();
    zoom(e.deltaY > 0 ? 1.25 : 0.8, timeAt(e.offsetX));
  }, {passive: false});
  canvas.addEventListener("keydown", e => {
    const by = (until - from) / 8, middle = (from + until) / 2;
    if (e.key === "ArrowLeft") move(-by);
    else if (e.key === "ArrowRight") move(by);
    else if (e.key === "+") zoom(0.5, middle);
    else if (e.key === "-") zoom(2, middle);
    else return;
    e.preventDefault();
  });

  function tell(e) {
    const hit = drawn.filter(([x, y, w]) => e.offsetX >= x - 1 && e.offsetX <= x + w + 1
      && e.offsetY >= y && e.offsetY <= y + ROW).pop();
    if (!hit) return;
    const [, name, begin, length, words] = hit[3];
    about.textContent =
      `${hit[4]}: ${words} ${data.names[name]}, ${clock(length)}, ${clock(begin)} into the step`;
  }

  document.querySelectorAll("[data-zoom]").forEach(button => button.addEventListener("click", () => {
    const middle = (from + until) / 2;
    if (button.dataset.zoom === "all") whole();
    else zoom(button.dataset.zoom === "in" ? 0.5 : 2, middle);
  }));
  document.querySelectorAll("[data-step]").forEach(link => link.addEventListener("click", () => {
    choose(Number(link.dataset.step));
  }));
  select.addEventListener("change", () => choose(Number(select.value)));
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  choose(data.typical);
})();
