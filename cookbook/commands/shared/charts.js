"use strict";
// Values under the pointer and smoothing, for the charts of a page that is whole without them.

const digits = value => String(Number(value.toPrecision(5)));

/** Exponential moving average, weighted as if nothing were before the first value. */
function smoothed(points, share) {
  let sum = 0, weight = 0;
  return points.map(([x, y]) => {
    sum = share * sum + (1 - share) * y;
    weight = share * weight + 1 - share;
    return [x, sum / weight];
  });
}

function nearest(points, x) {
  return points.reduce((best, point) => Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best);
}

function element(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function prepare(figure) {
  const chart = JSON.parse(figure.dataset.chart);
  const svg = figure.querySelector("svg");
  const [where, ...names] = figure.querySelectorAll(".legend li");
  const cells = names.map(name => name.querySelector("b"));
  const atTheEnd = [where, ...cells].map(cell => cell.textContent);
  const lines = chart.lines.map((line, i) => {
    const path = svg.getElementById(line.id).querySelector("path");
    return {...line, path, drawn: path && path.getAttribute("d"), shown: line.points, cell: cells[i]};
  });
  const [left, top, right, bottom] = chart.box, [[x0, x1], [y0, y1]] = [chart.x, chart.y];
  const across = x => left + (x - x0) / (x1 - x0) * (right - left);
  const up = y => bottom - (y - y0) / (y1 - y0) * (bottom - top);
  const pointer = element("g", {class: "pointer"});
  svg.append(pointer);

  svg.addEventListener("pointermove", event => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const x = x0 + (at.x - left) / (right - left) * (x1 - x0);
    const place = nearest(lines.flatMap(line => line.points.length ? [nearest(line.points, x)] : []), x)[0];
    const marks = Object.entries(chart.marks).filter(([, places]) => places.includes(place)).map(([name]) => name);
    where.textContent = [`${chart.across} ${digits(place)}`, ...marks].join(", ");
    pointer.replaceChildren(element("line", {x1: across(place), x2: across(place), y1: top, y2: bottom}));
    for (const line of lines.filter(line => line.points.length)) {
      const [itsPlace, y] = nearest(line.shown, place);
      line.cell.textContent = digits(y) + (itsPlace === place ? "" : ` at ${digits(itsPlace)}`);
      if (!line.is_area) {
        const style = `fill: var(--line-${line.ink})`;
        pointer.append(element("circle", {cx: across(itsPlace), cy: up(y), r: 3, style}));
      }
    }
  });
  svg.addEventListener("pointerleave", () => {
    pointer.replaceChildren();
    [where, ...cells].forEach((cell, i) => { cell.textContent = atTheEnd[i]; });
  });

  return share => {
    for (const line of lines.filter(line => line.can_smooth && line.path)) {
      line.raw?.remove();
      line.shown = share ? smoothed(line.points, share) : line.points;
      if (share) {
        line.raw = line.path.cloneNode();
        line.raw.setAttribute("class", "raw");
        line.path.before(line.raw);
        line.raw.setAttribute("d", line.drawn);
      }
      const path = "M" + line.shown.map(([x, y]) => `${across(x)} ${up(y)}`).join("L");
      line.path.setAttribute("d", share ? path : line.drawn);
    }
  };
}

const smooth = [...document.querySelectorAll("figure[data-chart]")].map(prepare);
const control = document.querySelector(".smoothing");
if (control) {
  const slider = control.querySelector("input");
  control.hidden = false;
  slider.addEventListener("input", () => {
    control.querySelector("output").textContent = slider.value;
    smooth.forEach(by => by(Number(slider.value)));
  });
}
