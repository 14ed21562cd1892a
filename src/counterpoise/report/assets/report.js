"use strict";
// Draws the figures that the page carries as data, in the colours of the page; a figure is drawn when it comes into view or the page is printed.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const options = { displayModeBar: false, responsive: true, showTips: false };
  const plots = [...document.querySelectorAll("[data-figure]")];
  const drawn = new Set();

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function themed(isPrint) {
    const light = { ink: "#5a636e", grid: "#e6e8eb", paper: "#ffffff", line: "#e2e5e9" };
    const page = { ink: colour("--soft"), grid: colour("--grid"), paper: colour("--raised"), line: colour("--line") };
    const c = isPrint ? light : page;
    return {
      "font.color": c.ink, "xaxis.gridcolor": c.grid, "yaxis.gridcolor": c.grid, "xaxis.zerolinecolor": c.grid, "yaxis.zerolinecolor": c.grid,
      "hoverlabel.bgcolor": c.paper, "hoverlabel.bordercolor": c.line, "hoverlabel.font.color": isPrint ? "#1a1d21" : colour("--ink"),
    };
  }

  // the palette's dark colours are too dim on a dark page
  const brighter = {
    "#0072B2": "#4fa8e8", "rgba(0,114,178,": "rgba(79,168,232,", "#D55E00": "#f28a3c", "rgba(213,94,0,": "rgba(242,138,60,",
    "#009E73": "#2cc79b", "rgba(0,158,115,": "rgba(44,199,155,",
  };

  function figureOf(place, isPrint) {
    let text = document.getElementById(`figure-${place.dataset.figure}`).textContent;
    const isDark = root.dataset.theme === "dark" && !isPrint;
    if (isDark) for (const [dim, bright] of Object.entries(brighter)) text = text.replaceAll(dim, bright);
    const figure = JSON.parse(text);
    // a printed sheet is laid out after this runs, so its sizes are given: two charts side by side on A4 or letter
    if (isPrint) Object.assign(figure.layout, { width: place.closest(".wide") ? 660 : 320, height: 190 });
    else figure.layout.height = place.clientHeight;
    return figure;
  }

  function paint(place, isPrint) {
    const figure = figureOf(place, isPrint);
    Plotly.react(place, figure.data, figure.layout, options).then(() => Plotly.relayout(place, themed(isPrint)));
  }

  function draw(place) {
    if (drawn.has(place)) return;
    drawn.add(place);
    paint(place, false);
  }

  function recolour(isPrint) {
    for (const place of drawn) paint(place, isPrint);
  }

  function setTheme(name) {
    root.dataset.theme = name;
    recolour(false);
  }

  setTheme(system.matches ? "dark" : "light");
  system.addEventListener("change", () => setTheme(system.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
  addEventListener("beforeprint", () => { plots.forEach(draw); recolour(true); });
  addEventListener("afterprint", () => recolour(false));

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { draw(entry.target); seen.unobserve(entry.target); }
  }, { rootMargin: "400px" });
  plots.forEach((place) => seen.observe(place));
})();
