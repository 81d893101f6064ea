// Trees of trajectories: tokens by kind, log-probabilities as a shade, branches under those that they fork from.

const NATS = 1e-4; // log-probabilities are whole numbers of it
const SHADES = [0.1, 0.5, 1, 2]; // nats below 0 at which the next shade begins
const KIND_HUES = { rendered: "none", sampled: 0, masked: 1, repeated: 5, rewritten: 4, moved: "none" };
const KIND_ABOUT = {
  rendered: "written by the template, only read", sampled: "by the model, trained here", masked: "by the model, not trained",
  repeated: "a reply that is trained elsewhere, again", rewritten: "a reply, but not as it was sampled",
  moved: "the token at the fork, again",
};

/** The arrays of a tree, decoded once: kinds, logs (NaN: none), advantages, rewards, versions. */
function treeArrays({ trajectory, length }) {
  if (!decoded.has(trajectory)) {
    const some = part => part && [...expanded(part.of_tokens, new Int32Array(length))].map(place => part.values[place]);
    const logs = trajectory.logs === undefined ? null
      : Float64Array.from(integers(trajectory.logs, length), count => (count ? -(count - 1) * NATS : NaN));
    decoded.set(trajectory, {
      kinds: [...expanded(trajectory.of_tokens, new Uint8Array(length))].map(number => trajectory.kinds[number]),
      logs, advantages: some(trajectory.advantages), rewards: some(trajectory.rewards),
      versions: trajectory.versions && expanded(trajectory.versions, new Int32Array(length)),
    });
  }
  return decoded.get(trajectory);
}

/** [begin, end, kind] of each stretch of one kind in [from, to). */
function kindRuns(trajectory, from, to) {
  const found = [];
  for (let k = 0, begin = 0; k < trajectory.of_tokens.length; k += 2) {
    const end = begin + trajectory.of_tokens[k];
    if (begin < to && end > from) found.push([Math.max(begin, from), Math.min(end, to), trajectory.kinds[trajectory.of_tokens[k + 1]]]);
    begin = end;
  }
  return found;
}

const shadeOf = log => SHADES.filter(bound => -log >= bound).length;
const natsText = log => `${log === 0 ? "0" : log.toFixed(3).replace("-", "−")} nats, ${percent(Math.exp(log))}`;

/** A document's view, with what is known of tokens of trajectories. */
function trajectoryView(each, view) {
  const { kinds, logs, advantages, rewards, versions } = treeArrays(each);
  const forks = new Map();
  for (const [i, child] of each.trajectory.branches.flatMap(branch => branch.forks)) forks.set(i, [...(forks.get(i) ?? []), child]);
  const hasLog = i => logs && !Number.isNaN(logs[i]);
  return {
    ...view,
    mark(token, i) {
      token.dataset.kind = kinds[i];
      token.dataset.hue = KIND_HUES[kinds[i]];
      if (hasLog(i) && view.weight(i) !== 0) token.dataset.shade = shadeOf(logs[i]);
      for (const child of forks.get(i) ?? []) token.append(element("i", { class: "fork", "data-to": `↳${letter(child)}` }));
    },
    tell(i) {
      const lines = view.tell(i);
      lines.splice(2, 0, ["kind", `${kinds[i]}: ${KIND_ABOUT[kinds[i]]}`]);
      if (hasLog(i)) lines.splice(3, 0, ["log-probability", natsText(logs[i])]);
      for (const [name, values] of [["advantage", advantages], ["turn reward", rewards]]) {
        if (values && values[i] !== undefined) lines.push([name, String(values[i])]);
      }
      if (versions && kinds[i] === "sampled") lines.push(["policy version", String(versions[i])]);
      return lines;
    },
  };
}

/** A frame for each branch, and in it a block for each of its stretches. */
function trajectoryBlocks(each) {
  return each.trajectory.branches.flatMap((branch, number) => {
    const [begin, end, at, parent] = each.branches[number];
    const frame = element("section", { class: "block branch", style: { "--depth": String(branch.depth) }, "aria-label": `branch ${letter(number)}` },
      element("div", { class: "role" }, element("b", { class: "letter" }, letter(number)), branch.label || "no path ends here", " ",
        element("span", { class: "quiet" }, `${plural(end - begin, "token")}${parent < 0 ? "" : ` from position ${counted(at)} of ${letter(parent)}`}`)),
      ...branch.why.map(why => element("p", { class: "why" }, `why: ${why}`)));
    if (parent >= 0) frame.classList.add("forked");
    return branch.segments.map(([first, last, title, about], k) => {
      const into = element("div", { class: "text" });
      const kinds = treeArrays(each).kinds.slice(first, last);
      const kind = kinds.includes("sampled") ? "sampled" : kinds.at(-1); // the first may be that at the fork
      const head = title ? element("div", { class: "said", "data-hue": KIND_HUES[kind] }, element("b", {}, title),
        about ? element("span", { class: "quiet" }, about) : null) : null;
      frame.append(element("div", { class: title ? "segment titled" : "segment", "data-hue": KIND_HUES[kind] }, ...(head ? [head] : []), into));
      return { begin: first, end: last, into, frame: k ? null : frame };
    });
  });
}

/** The kinds of a tree with their looks, and what the shades say. */
function kindLegend(trajectory) {
  const sample = (kind, text, more) => element("span",
    { class: kind === "sampled" ? "look trained" : "look", "data-kind": kind, "data-hue": KIND_HUES[kind], ...more }, text);
  const kinds = trajectory.kinds.filter(kind => kind !== "moved").map(kind =>
    element("span", { class: "kind" }, sample(kind, kind), " ", KIND_ABOUT[kind]));
  const shades = trajectory.logs === undefined ? null : element("span", { class: "kind" }, "log-probability ",
    ...["0", ...SHADES.map(bound => `−${bound}`)].map((text, shade) => sample("sampled", text, { "data-shade": shade })), " nats and less");
  return element("div", { class: "kinds" }, element("div", {}, trajectory.about), ...kinds, shades);
}
