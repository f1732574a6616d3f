// Links select a parameter without this script. It marks ranks, and finds any layer by its name:
// #model.layers.3.mlp.up_proj.weight, followed by @5 for rank 5.
(() => {
  const titles = [...document.querySelectorAll(".title")];
  const links = [...document.querySelectorAll("nav a")];
  const find = name => titles.find(t => t.id === name)
    || titles.find(t => t.dataset.names.split(" ").includes(name)) || titles[0];
  let title, rank = null;

  function decoded(hash) {  // the target of a link; as it is if it is no valid encoding: #%
    try { return decodeURIComponent(hash.slice(1)); } catch { return hash.slice(1); }
  }

  function ring(shape) {
    const copy = shape.cloneNode(false);
    for (const name of ["style", "data-r", "data-b"]) copy.removeAttribute(name);
    copy.setAttribute("class", "ring");
    shape.parentNode.append(copy);
  }

  function mark(next) {
    const section = title.closest("section");
    document.querySelectorAll(".ring").forEach(e => e.remove());
    const cell = next === null ? null : section.querySelector(`.c[data-r="${next}"]`);
    rank = cell ? next : null;
    const chosen = section.querySelector(".chosen");
    if (!cell) { chosen.textContent = "Choose a rank to see its block."; return; }
    ring(cell);
    section.querySelectorAll(`.b:not(.c)[data-b="${cell.dataset.b}"]`).forEach(ring);
    chosen.textContent = cell.querySelector("title").textContent;
  }

  function show() {
    const [, name, at] = decoded(location.hash).match(/^(.*?)(?:@(\d+))?$/);
    title = find(name);
    document.querySelectorAll(".shown").forEach(e => e.classList.remove("shown"));
    title.classList.add("shown");
    title.closest("section").classList.add("shown");
    links.forEach(a => decoded(a.hash) === title.id
      ? a.setAttribute("aria-current", "true") : a.removeAttribute("aria-current"));
    mark(at === undefined ? null : Number(at));
    bringIntoView();
  }

  function bringIntoView() {  // the mesh may scroll on its own
    const marked = rank === null ? null : title.closest("section").querySelector(".mesh .ring");
    if (marked) marked.scrollIntoView({ block: "nearest" });
  }

  function choose(next) {
    mark(next);
    const page = location.href.split("#")[0];  // a run's page frames this one: # alone means that page
    history.replaceState(null, "", `${page}#${title.id}${rank === null ? "" : `@${rank}`}`);
  }

  document.addEventListener("click", event => {
    const shape = event.target.closest && event.target.closest(".b[data-b]");
    if (!shape) return;
    const own = shape.dataset.r;
    const first = shape.closest("section").querySelector(`.c[data-b="${shape.dataset.b}"]`);
    choose(Number(own === undefined ? first.dataset.r : own));
  });

  document.addEventListener("keydown", event => {
    const figure = event.target.closest && event.target.closest(".mesh");
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!figure || !step) return;
    const ranks = [...figure.querySelectorAll(".c")].map(c => Number(c.dataset.r));
    const at = rank === null ? (step > 0 ? -1 : 0) : ranks.indexOf(rank);
    choose(ranks[(at + step + ranks.length) % ranks.length]);
    bringIntoView();
    event.preventDefault();
  });

  addEventListener("hashchange", show);
  show();
})();
