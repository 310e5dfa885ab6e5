// Reads a JSON list of SDLs on stdin, prints a JSON list with the faults of each that Akash's own parser finds.
// The folder of its package.json is the only argument. What is exported there does not name the parser: it is loaded by path.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";

const require = createRequire(path.join(process.argv[2], "package.json"));
const { load } = require("js-yaml");
const sdl = require(path.join(path.dirname(require.resolve("@akashnetwork/chain-sdk")), "sdl", "index.cjs"));

function findFaults(text) {
  try {
    const made = sdl.generateManifest(load(text), "mainnet");
    return made.ok ? [] : made.value.map((fault) => `${fault.instancePath}: ${fault.message}`);
  } catch (error) {
    return [`exception: ${error.message}`];
  }
}

console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf8")).map(findFaults)));
