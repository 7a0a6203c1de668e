"use strict";
/* Draws a figure when its fold is opened, in the colours of the page. */
const config = { displaylogo: false, showSendToCloud: false, plotlyServerURL: "", showLink: false, responsive: true,
  modeBarButtons: [["zoom2d", "pan2d", "resetScale2d"]] };
for (const fold of document.querySelectorAll("details.explore")) {
  fold.addEventListener("toggle", () => {
    if (!fold.open || fold.dataset.drawn) return;
    fold.dataset.drawn = "yes";
    const id = fold.dataset.plot, style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const { data, layout } = JSON.parse(document.getElementById(id + "-json").textContent);
    for (const trace of data) {
      trace.marker = { color: colour("--" + trace.meta) };
      if (trace.type === "scatter") trace.line = { ...trace.line, color: colour("--" + trace.meta) };
    }
    Plotly.newPlot(id + "-plot", data, { ...layout,
      font: { color: colour("--ink"), family: "system-ui, sans-serif" }, paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      xaxis: { gridcolor: colour("--rule"), ...layout.xaxis }, yaxis: { gridcolor: colour("--rule"), ...layout.yaxis },
      margin: { l: 60, r: 20, t: 20, b: 50 }, height: 320, hovermode: "x unified",
      legend: { orientation: "h", y: 1.15 } }, config);
  });
}
