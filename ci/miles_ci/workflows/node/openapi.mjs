// arguments: "METHOD /path" ...; stdout: JSON {"METHOD /path": {parameters, request, responses: {status: schema}}}
// with a shared `$defs`, cut from GitHub's own API description.
import { createRequire } from "node:module";

const require = createRequire(import.meta.url);
const api = require("@octokit/openapi/generated/api.github.com.json");
const defs = {};

function rewrite(node) {
  if (Array.isArray(node)) return node.map(rewrite);
  if (node === null || typeof node !== "object") return node;
  const out = {};
  for (const [key, value] of Object.entries(node)) {
    if (["example", "examples", "description", "title", "externalDocs", "x-github", "deprecated"].includes(key) &&
        typeof value !== "object") continue;
    if (key === "examples" || key === "example" || key === "x-github") continue;
    if (key === "$ref" && typeof value === "string") {
      const name = value.split("/").pop();
      out.$ref = `#/$defs/${name}`;
      if (!(name in defs)) {
        defs[name] = null;
        const target = value.split("/").slice(1).reduce((at, part) => at[part], api);
        defs[name] = rewrite(target);
      }
    } else out[key] = rewrite(value);
  }
  if (out.nullable && out.type) {
    out.type = [].concat(out.type, "null");
    if (out.enum) out.enum = [...out.enum, null];
  }
  delete out.nullable;
  return out;
}

const resolve = (node) => (node.$ref ? node.$ref.split("/").slice(1).reduce((at, part) => at[part], api) : node);
const operations = {};
for (const wanted of process.argv.slice(2)) {
  const [method, path] = wanted.split(" ");
  const found = api.paths[path]?.[method.toLowerCase()];
  if (!found) throw new Error(`GitHub's description has no ${wanted}`);
  const parameters = (found.parameters ?? []).map(resolve);
  const responses = {};
  for (const [status, reply] of Object.entries(found.responses)) {
    const schema = resolve(reply).content?.["application/json"]?.schema;
    responses[status] = schema ? rewrite(schema) : null;
  }
  const body = found.requestBody ? resolve(found.requestBody).content?.["application/json"]?.schema : null;
  operations[wanted] = {
    query: parameters.filter((item) => item.in === "query").map((item) => item.name).sort(),
    request: body ? rewrite(body) : null,
    responses,
  };
}
process.stdout.write(JSON.stringify({ operations, $defs: defs }));
