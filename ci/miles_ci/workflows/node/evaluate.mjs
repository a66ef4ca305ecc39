// stdin: JSON list of {expression, contexts}; stdout: JSON list of {kind, text, json} or {error}.
// Status functions are stand-ins that return what `contexts.__status` says.
import fs from "node:fs";
import { data, Evaluator, Lexer, Parser } from "@actions/expressions";

const STATUS = ["success", "failure", "cancelled", "always"];

function functionsFor(status) {
  return STATUS.map((name) => ({
    name,
    minArgs: 0,
    maxArgs: 0,
    description: name,
    call: () => new data.BooleanData(Boolean(status[name])),
  }));
}

function run({ expression, contexts }) {
  const { __status: status = {}, ...visible } = contexts;
  const functions = functionsFor(status);
  const names = Object.keys(visible);
  try {
    const tree = new Parser(new Lexer(expression).lex().tokens, names, functions).parse();
    const pairs = names.map((key) => ({ key, value: JSON.parse(JSON.stringify(visible[key]), data.reviver) }));
    const table = new Map(functions.map((entry) => [entry.name, entry]));
    const value = new Evaluator(tree, new data.Dictionary(...pairs), table).evaluate();
    return { kind: data.Kind[value.kind], text: value.coerceString(), json: JSON.stringify(value, data.replacer) };
  } catch (error) {
    return { error: String(error.message ?? error) };
  }
}

process.stdout.write(JSON.stringify(JSON.parse(fs.readFileSync(0, "utf8")).map(run)));
