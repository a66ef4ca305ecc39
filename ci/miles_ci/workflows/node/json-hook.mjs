// Lets Node 20 import the parser's JSON schema, whose import statement lacks the attribute Node asks for.
// Use: node --import ./json-hook.mjs script.mjs
import { register } from "node:module";

const hooks = `
const typed = (attributes) => ({ ...attributes, type: "json" });
export async function resolve(specifier, context, next) {
  const found = await next(specifier, context);
  return found.url.endsWith(".json") ? { ...found, importAttributes: typed(found.importAttributes) } : found;
}
export async function load(url, context, next) {
  if (!url.endsWith(".json")) return next(url, context);
  return next(url, { ...context, importAttributes: typed(context.importAttributes) });
}
`;
register("data:text/javascript," + encodeURIComponent(hooks));
