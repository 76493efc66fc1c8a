// Spans that are too short to see, as shares of time: what time_shares.py does, at the visitor's zoom.
// Arguments: `spans` and `bars`, two data sources; `visible`, a filter of `spans`; `plot`; and the
// constants of time_shares.py. One change of the chart may start this script several times; it draws once
// per frame.
const waiting = (globalThis.waitingTimeShares ??= new WeakSet());
if (waiting.has(bars)) return;
waiting.add(bars);
requestAnimationFrame(() => { waiting.delete(bars); update(); });

function update() {
  const {begin, end, y, height, color, shade} = spans.data;
  const {start: low, end: high} = plot.x_range;
  const width = plot.inner_width;
  if (begin == null || !(high > low) || !(width > 0)) return;
  const secondsPerPixel = (high - low) / width;
  const count = begin.length;

  const lanes = new Map(), kinds = new Map();
  const laneOf = new Array(count);  // of a span in view; otherwise undefined
  let first = Infinity, last = -Infinity;
  for (let i = 0; i < count; i++) {
    if (begin[i] < first) first = begin[i];
    if (end[i] > last) last = end[i];
    if (end[i] <= low || begin[i] >= high) continue;
    let lane = lanes.get(y[i]);
    if (lane === undefined) {
      lane = {y: y[i], height: height[i], count: 0, visible: 0, first: Infinity, last: -Infinity};
      lanes.set(y[i], lane);
    }
    lane.count++;
    lane.first = Math.min(lane.first, Math.max(begin[i], low));
    lane.last = Math.max(lane.last, Math.min(end[i], high));
    if (end[i] - begin[i] >= min_width * secondsPerPixel) lane.visible++;
    laneOf[i] = lane;
  }

  // Bins of time; for each bin and each kind of span, the covered seconds and one of the spans.
  const step = 2 ** Math.ceil(Math.log2(min_bin_width * secondsPerPixel));
  const firstBin = Math.floor(Math.max(low, first) / step);
  const bins = Math.max(0, Math.ceil(Math.min(high, last) / step) - firstBin);
  const kindOf = (i) => color[i] - (shade === undefined ? 1 : shade[i]) / 2;
  for (let i = 0; i < count; i++) if (laneOf[i] !== undefined) kinds.set(kindOf(i), 0);
  const ordered = [...kinds.keys()].sort((a, b) => a - b);
  ordered.forEach((kind, place) => kinds.set(kind, place));
  const isDense = (lane) => lane.count * min_bin_width * secondsPerPixel > lane.last - lane.first;
  const crowded = [...lanes.values()].filter((lane) =>
    isDense(lane) && lane.count > max_spans && lane.visible < min_visible_share * lane.count);
  for (const lane of crowded) {
    lane.covered = new Float64Array(bins * ordered.length);
    lane.span = new Int32Array(bins * ordered.length);
  }
  for (let i = 0; crowded.length > 0 && i < count; i++) {
    const lane = laneOf[i];
    if (lane === undefined || lane.covered === undefined) continue;
    const until = Math.min(Math.ceil(end[i] / step) - firstBin, bins);
    for (let bin = Math.max(Math.floor(begin[i] / step) - firstBin, 0); bin < until; bin++) {
      const left = (firstBin + bin) * step, place = bin * ordered.length + kinds.get(kindOf(i));
      lane.covered[place] += Math.min(end[i], left + step) - Math.max(begin[i], left);
      lane.span[place] = i;
    }
  }

  const data = Object.fromEntries(Object.keys(bars.data).map((name) => [name, []]));
  const copied = Object.keys(data).filter((name) =>
    !["y", "height", "begin", "end", "drawn_end", "percent"].includes(name));
  function draw(middle, thickness, left, right, drawnEnd, share, span) {
    data.y.push(middle);
    data.height.push(thickness);
    data.begin.push(left);
    data.end.push(right);
    data.drawn_end.push(drawnEnd);
    data.percent.push(100 * share);
    for (const name of copied) data[name].push(spans.data[name][span]);
  }
  const overlap = secondsPerPixel / 2;  // so that nothing shines through between two bars
  for (const lane of crowded) {
    for (let bin = 0; bin < bins; bin++) {
      const left = Math.max((firstBin + bin) * step, first);
      const right = Math.min((firstBin + bin + 1) * step, last);
      let below = 0;
      for (let kind = 0; kind < ordered.length; kind++) {
        const place = bin * ordered.length + kind;
        if (lane.covered[place] === 0) continue;
        const share = lane.covered[place] / (right - left);
        const middle = lane.y + lane.height / 2 - lane.height * (below + share / 2);
        draw(middle, lane.height * share, left, right, right + overlap, share, lane.span[place]);
        below += share;
      }
    }
  }
  if (crowded.length > 0) {
    // Two bars without height, so that the axis has the same limits as with the spans.
    for (const at of [first, last]) draw(crowded[0].y, 0, at, at, at, 0, 0);
  }
  if (crowded.length > 0 || bars.get_length() > 0) bars.data = data;
  const hidden = new Set(crowded.map((lane) => lane.y));
  const shown = hidden.size > 0 ? Array.from(y, (lane) => !hidden.has(lane)) : null;
  if (shown != null || visible.booleans != null) visible.booleans = shown;
}
