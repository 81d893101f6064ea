// Tokens that differ between two versions of one document.

const MOST_EDITS = 1500; // beyond that, all of the middle counts as different

/** Two documents → { a, b }: per token 0 = the same, 1 = other weight, 2 = not in the other; and pair of each. */
function differenceOf(left, right) {
  const a = arraysOf(left), b = arraysOf(right);
  const marks = { a: new Uint8Array(left.length).fill(2), b: new Uint8Array(right.length).fill(2) };
  const pairs = { a: new Int32Array(left.length).fill(-1), b: new Int32Array(right.length).fill(-1) };
  for (const [i, j] of matched(a.tokens, b.tokens)) {
    marks.a[i] = marks.b[j] = a.weights[i] === b.weights[j] ? 0 : 1;
    pairs.a[i] = j;
    pairs.b[j] = i;
  }
  return { marks, pairs };
}

/** Pairs (i, j) of a longest common subsequence; Myers 1986, after the common ends are taken off. */
function matched(a, b) {
  const found = [];
  let begin = 0, endA = a.length, endB = b.length;
  while (begin < endA && begin < endB && a[begin] === b[begin]) { found.push([begin, begin]); begin++; }
  while (endA > begin && endB > begin && a[endA - 1] === b[endB - 1]) found.push([--endA, --endB]);
  const n = endA - begin, m = endB - begin;
  if (!n || !m) return found;
  const most = Math.min(n + m, MOST_EDITS), reach = new Int32Array(2 * most + 3), middle = most + 1, trail = [];
  for (let d = 0; d <= most; d++) {
    trail.push(reach.slice(middle - d - 1, middle + d + 1));
    for (let k = -d; k <= d; k += 2) {
      const down = k === -d || (k !== d && reach[middle + k - 1] < reach[middle + k + 1]);
      let x = down ? reach[middle + k + 1] : reach[middle + k - 1] + 1;
      while (x < n && x - k < m && a[begin + x] === b[begin + x - k]) x++;
      reach[middle + k] = x;
      if (x >= n && x - k >= m) return found.concat(walkedBack(trail, n, m, begin));
    }
  }
  return found;
}

function walkedBack(trail, x, y, begin) {
  const found = [];
  for (let d = trail.length - 1; d >= 0; d--) {
    const reach = trail[d], at = k => reach[k + d + 1], k = x - y;
    const down = k === -d || (k !== d && at(k - 1) < at(k + 1));
    const before = down ? k + 1 : k - 1, fromX = d ? at(before) : 0, fromY = d ? fromX - before : 0;
    while (x > fromX && y > fromY) { x--; y--; found.push([begin + x, begin + y]); }
    x = fromX;
    y = fromY;
  }
  return found;
}
