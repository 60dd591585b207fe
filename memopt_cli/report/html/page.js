"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const touch = matchMedia("(pointer: coarse)").matches;

function themed() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axes = Object.fromEntries(["xaxis", "yaxis"].flatMap((axis) =>
    ["gridcolor", "linecolor", "zerolinecolor"].map((part) => [`${axis}.${part}`, colour("--line")])));
  return {
    ...axes,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    "font.color": colour("--text"),
    "font.family": "system-ui, sans-serif",
    "hoverlabel.bgcolor": colour("--card"),
    "hoverlabel.bordercolor": colour("--line"),
    "hoverlabel.font.color": colour("--text"),
  };
}

/* Dragging zooms with a mouse and scrolls the page with a finger. */
const config = { responsive: true, displayModeBar: false };
const ready = Promise.all(Object.entries(figures).map(([id, figure]) =>
  Plotly.newPlot(id, figure.data, { ...figure.layout, dragmode: touch ? false : "zoom" }, config)
    .then(() => Plotly.relayout(id, themed()))));

dark.addEventListener("change", () => {
  for (const id of Object.keys(figures)) Plotly.relayout(id, themed());
});

for (const button of document.querySelectorAll("button[data-category]")) {
  button.setAttribute("aria-pressed", "true");
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") === "false";
    button.setAttribute("aria-pressed", String(shown));
    for (const [id, figure] of Object.entries(figures)) {
      const index = figure.data.findIndex((trace) => trace.name === button.dataset.category);
      if (index >= 0) Plotly.restyle(id, { visible: shown }, [index]);
    }
  });
}
