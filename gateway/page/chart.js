// Tokens over time of two runs, as lines that can be told apart without colour.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 220;
const EDGE = { top: 14, right: 16, bottom: 28, left: 40 };

/** Draw `runs`, each `{name, kind, tokens}`, into `svg`, as far as `seconds` have passed. */
export function drawTimeline(svg, runs, seconds) {
  const width = Math.max(280, svg.clientWidth || 720);
  const end = Math.max(0.1, ...runs.flatMap(({ tokens }) => tokens.map((token) => token.seconds)));
  const most = Math.max(1, ...runs.map(({ tokens }) => tokens.length));
  const x = (time) => EDGE.left + (time / end) * (width - EDGE.left - EDGE.right);
  const y = (count) => HEIGHT - EDGE.bottom - (count / most) * (HEIGHT - EDGE.top - EDGE.bottom);
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  svg.replaceChildren(
    ...ticks(end, 5).flatMap((time) => [
      line("grid", x(time), y(0), x(time), y(most)),
      label(`${time} s`, x(time), HEIGHT - 8, "middle"),
    ]),
    ...ticks(most, 4).flatMap((count) => [
      line("grid", x(0), y(count), x(end), y(count)),
      label(String(count), EDGE.left - 8, y(count) + 4, "end"),
    ]),
    ...runs.flatMap(({ kind, name, tokens }, index) => {
      const passed = tokens.filter((token) => token.seconds <= seconds);
      const row = HEIGHT - EDGE.bottom - 34 + index * 20;
      return [
        path(kind, steps(passed, x, y)),
        path(kind, `M${width - 168} ${row - 4}h28`),
        label(name, width - 132, row, "start"),
      ];
    }),
  );
}

function steps(tokens, x, y) {
  let drawn = `M${x(0)} ${y(0)}`;
  tokens.forEach((token, index) => {
    const isLastOfItsMoment = tokens[index + 1]?.seconds !== token.seconds;
    if (isLastOfItsMoment) drawn += `H${x(token.seconds).toFixed(1)}V${y(index + 1).toFixed(1)}`;
  });
  return drawn;
}

/** At most `most` + 1 round numbers from 0 to `end`. */
function ticks(end, most) {
  const rough = end / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, index) => Number((index * step).toFixed(digits)));
}

function line(kind, x1, y1, x2, y2) {
  return node("line", { class: kind, x1, y1, x2, y2 });
}

function path(kind, d) {
  return node("path", { class: `run ${kind}`, d });
}

function label(text, x, y, anchor) {
  const element = node("text", { x, y, "text-anchor": anchor });
  element.textContent = text;
  return element;
}

function node(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
