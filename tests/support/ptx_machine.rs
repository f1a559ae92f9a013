//! Runs a kernel's PTX on the processor, as the PTX ISA describes its instructions: cubes one after the other, of a cube
//! one plane after the other up to the next barrier, the units of a plane in step. Instructions are those that kernels
//! here are compiled to for sm_80; others end the run.
//!
//! Shared memory begins as NaN, and so does what a copy that was not waited for will write. Accesses outside of memory
//! or off their alignment, and instructions of a plane that not all of its units take part in, end the run too.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// Where memory of the card begins, as pointers count.
pub const MEMORY: u64 = 0x70_0000_0000;
/// Units of a plane.
const PLANE: usize = 32;
/// The place of a unit that has ended.
const ENDED: usize = usize::MAX;

/// A copy into shared memory: unit, from, to, bytes, and how many are copied.
type Copy = (usize, usize, usize, usize, usize);

/// A kernel.
#[derive(Debug)]
pub struct Program {
    parameters: BTreeMap<String, usize>,
    instructions: Vec<Instruction>,
    registers: HashMap<String, usize>,
    labels: HashMap<String, usize>,
}

#[derive(Debug)]
struct Instruction {
    /// Only where this register is true, or if negated is not.
    guard: Option<(usize, bool)>,
    /// The name between points, what it is of last.
    name: Vec<String>,
    operands: Vec<Operand>,
}

#[derive(Clone, Debug)]
enum Operand {
    Register(usize),
    Number(u64),
    /// `%tid.x` and the like.
    Special(String),
    /// `{a, b}`.
    Several(Vec<Operand>),
    /// `[a + offset]`.
    Address(Box<Operand>, i64),
    /// `[parameter + offset]`, by its place.
    Parameter(usize),
    Label(String),
}

/// A cube as it runs.
struct Cube<'a> {
    program: &'a Program,
    memory: &'a mut [u8],
    parameters: &'a [u8],
    shared: Vec<u8>,
    /// Of each register the number of each unit.
    registers: Vec<Vec<u64>>,
    special: HashMap<String, u64>,
    /// Copies that were not waited for.
    copies: Vec<Copy>,
    units: usize,
}

impl Program {
    /// Reads PTX of one kernel.
    pub fn read(text: &str) -> Program {
        let text: String =
            text.lines().map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n");
        let entry = &text[text.find(".entry").expect("there is a kernel")..];
        let (head, body) = entry.split_once("\n{").expect("it has a body");
        let head = &head[head.find('(').map_or(0, |at| at + 1)..head.rfind(')').expect("parameters end")];
        let mut program = Program {
            parameters: parameters(head),
            instructions: Vec::new(),
            registers: HashMap::new(),
            labels: HashMap::new(),
        };
        body.split(';').for_each(|statement| program.add(statement));
        program
    }

    fn add(&mut self, statement: &str) {
        let mut rest = statement.trim();
        loop {
            rest = rest.trim_start_matches(['{', '}']).trim_start();
            match rest.split_once(':').filter(|(label, _)| label.starts_with("$L") && !label.contains(' ')) {
                Some((label, after)) => {
                    self.labels.insert(label.to_owned(), self.instructions.len());
                    rest = after.trim_start();
                }
                None => break,
            }
        }
        if rest.is_empty() || [".reg", ".loc", ".pragma"].iter().any(|directive| rest.starts_with(directive)) {
            return;
        }
        let mut guard = None;
        if let Some(after) = rest.strip_prefix('@') {
            let (register, after) = after.split_once(char::is_whitespace).expect("an instruction follows");
            guard = Some((self.register(register.trim_start_matches('!')), register.starts_with('!')));
            rest = after.trim_start();
        }
        let (name, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        let name = name.replace("::cta", "").split('.').map(str::to_owned).collect();
        let operands = split(operands).iter().map(|text| self.operand(text)).collect();
        self.instructions.push(Instruction { guard, name, operands });
    }

    fn register(&mut self, name: &str) -> usize {
        let next = self.registers.len();
        *self.registers.entry(name.to_owned()).or_insert(next)
    }

    fn operand(&mut self, text: &str) -> Operand {
        if let Some(inside) = text.strip_prefix('{').and_then(|text| text.strip_suffix('}')) {
            return Operand::Several(split(inside).iter().map(|text| self.operand(text)).collect());
        }
        if let Some(inside) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) {
            let (base, offset) = inside.split_once('+').unwrap_or((inside, "0"));
            let offset: i64 = offset.trim().parse().expect("an offset is a number");
            return match self.parameters.get(base.trim()) {
                Some(place) => Operand::Parameter(place + offset as usize),
                None => Operand::Address(Box::new(self.operand(base.trim())), offset),
            };
        }
        let bits = |digits: &str| u64::from_str_radix(digits, 16).expect("a number in bits");
        match text.as_bytes() {
            [b'%', ..] if text.contains('.') => Operand::Special(text.to_owned()),
            [b'%', ..] => Operand::Register(self.register(text)),
            [b'$', ..] => Operand::Label(text.to_owned()),
            [b'0', b'f', ..] => Operand::Number(bits(&text[2..])),
            [b'0', b'x', ..] => Operand::Number(bits(&text[2..])),
            // The name of shared memory stands for its beginning.
            [first, ..] if first.is_ascii_alphabetic() => Operand::Number(0),
            _ => Operand::Number(text.parse::<i64>().expect("a number") as u64),
        }
    }

    /// Runs cubes on the card's memory.
    pub fn run(&self, cubes: [u32; 2], units: usize, shared: usize, memory: &mut [u8], parameters: &[u8]) {
        for cube in (0..cubes[1]).flat_map(|y| (0..cubes[0]).map(move |x| [x, y])) {
            let special = [("%ctaid.x", cube[0]), ("%ctaid.y", cube[1]), ("%nctaid.x", cubes[0])];
            let special = special.map(|(name, number)| (name.to_owned(), u64::from(number)));
            let mut cube = Cube {
                program: self,
                memory,
                parameters,
                shared: vec![0xff; shared],
                registers: vec![vec![0x7fff_ffff_7fff_ffff; units]; self.registers.len()],
                special: special.into(),
                copies: Vec::new(),
                units,
            };
            cube.run();
        }
    }
}

/// Where each parameter lies.
fn parameters(head: &str) -> BTreeMap<String, usize> {
    let mut place = 0;
    let mut parameters = BTreeMap::new();
    for parameter in head.split(',') {
        let name = parameter.split_whitespace().last().expect("a parameter has a name");
        let (name, bytes) = match name.split_once('[') {
            Some((name, length)) => (name, length.trim_end_matches(']').parse().expect("a length")),
            None if parameter.contains("64") => (name, 8),
            None => (name, 4),
        };
        place = usize::next_multiple_of(place, if parameter.contains(".align 4") || bytes == 4 { 4 } else { 8 });
        parameters.insert(name.to_owned(), place);
        place += bytes;
    }
    parameters
}

/// Parts between commas that are in no brackets.
fn split(text: &str) -> Vec<String> {
    let mut depth = 0;
    let inside = |letter: char| {
        depth += i32::from(matches!(letter, '{' | '[')) - i32::from(matches!(letter, '}' | ']'));
        letter == ',' && depth == 0
    };
    text.split(inside).map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
}

impl Cube<'_> {
    fn run(&mut self) {
        let mut places = vec![0; self.units];
        let mut waits = vec![false; self.units];
        let mut left = self.units;
        let mut barriers = 0;
        while left > 0 {
            // Planes take turns in being first and last: what lacks a barrier finds numbers that are not there yet, or
            // not any more.
            let mut planes = (0..self.units).step_by(PLANE).map(|first| first..first + PLANE);
            let runs = |plane: &Range<usize>| plane.clone().any(|unit| !waits[unit]);
            let Some(plane) = (if barriers % 2 == 0 { planes.find(runs) } else { planes.rfind(runs) }) else {
                barriers += 1;
                waits.iter_mut().zip(&places).for_each(|(waits, place)| *waits = *place == ENDED);
                continue;
            };
            // The unit that is furthest behind goes on, with those that are there too.
            let behind = plane.clone().filter(|unit| !waits[*unit]).map(|unit| places[unit]).min();
            let place = behind.expect("a unit of the plane does not wait");
            let instruction = &self.program.instructions[place];
            let here = |unit: &usize| !waits[*unit] && places[*unit] == place;
            let units: Vec<usize> = plane.filter(here).collect();
            units.iter().for_each(|unit| places[*unit] += 1);
            let takes_part = |unit: &usize| match instruction.guard {
                Some((register, negated)) => (self.registers[register][*unit] != 0) != negated,
                None => true,
            };
            let units: Vec<usize> = units.into_iter().filter(takes_part).collect();
            match (instruction.name[0].as_str(), &instruction.operands[..]) {
                ("bra", [Operand::Label(label)]) => {
                    units.iter().for_each(|unit| places[*unit] = self.program.labels[label]);
                }
                ("ret", _) => {
                    let is_on_its_way = |copy: &Copy| units.contains(&copy.0);
                    assert!(!self.copies.iter().any(is_on_its_way), "a unit ends before its copies have come");
                    left -= units.len();
                    units.iter().for_each(|unit| (places[*unit], waits[*unit]) = (ENDED, true));
                }
                ("bar", _) => units.iter().for_each(|unit| waits[*unit] = true),
                _ => self.step(instruction, &units),
            }
        }
    }

    fn get(&self, operand: &Operand, unit: usize) -> u64 {
        match operand {
            Operand::Register(register) => self.registers[*register][unit],
            Operand::Number(number) => *number,
            Operand::Special(name) if name == "%tid.x" => unit as u64,
            Operand::Special(name) => self.special[name],
            Operand::Address(base, offset) => self.get(base, unit).wrapping_add_signed(*offset),
            other => panic!("{other:?} is no number"),
        }
    }

    fn number(&self, operand: &Operand, unit: usize) -> f32 {
        f32::from_bits(self.get(operand, unit) as u32)
    }

    fn set(&mut self, operand: &Operand, unit: usize, number: u64) {
        match operand {
            Operand::Register(register) => self.registers[*register][unit] = number,
            other => panic!("{other:?} is no register"),
        }
    }

    /// Where bytes lie in shared memory, or else in the card's.
    fn place(&self, operand: &Operand, unit: usize, is_shared: bool, bytes: usize) -> usize {
        let address = self.get(operand, unit);
        let place = if is_shared { address as u32 as usize } else { address.wrapping_sub(MEMORY) as usize };
        let end = if is_shared { self.shared.len() } else { self.memory.len() };
        assert!(
            place.checked_add(bytes).is_some_and(|last| last <= end),
            "{operand:?} is outside of memory: {address:#x}"
        );
        assert!(place.is_multiple_of(bytes), "{operand:?} is not aligned to {bytes} bytes");
        place
    }

    fn step(&mut self, instruction: &Instruction, units: &[usize]) {
        let Instruction { name, operands, .. } = instruction;
        let has = |part: &str| name.iter().any(|it| it == part);
        match name[0].as_str() {
            "ld" | "st" => units.iter().for_each(|unit| self.access(instruction, *unit)),
            "cp" if has("wait_all") => self.finish_copies(units),
            "cp" => units.iter().for_each(|unit| self.start_copy(operands, *unit)),
            "ldmatrix" => self.planes(units, |cube, plane| cube.load_matrices(operands, plane, has("trans"))),
            "mma" => self.planes(units, |cube, plane| cube.multiply(operands, plane)),
            "shfl" => self.planes(units, |cube, plane| cube.exchange(operands, plane)),
            _ => {
                for &unit in units {
                    let result = self.compute(instruction, unit);
                    self.set(&operands[0], unit, result);
                }
            }
        }
    }

    /// Runs an instruction of whole planes, by their first units.
    fn planes(&mut self, units: &[usize], run: impl Fn(&mut Self, usize)) {
        for plane in units.chunks(PLANE) {
            let is_whole = plane.len() == PLANE && plane[0].is_multiple_of(PLANE) && plane[31] == plane[0] + 31;
            assert!(is_whole, "only {plane:?} of a plane take part");
            run(self, plane[0]);
        }
    }

    fn access(&mut self, instruction: &Instruction, unit: usize) {
        let Instruction { name, operands, .. } = instruction;
        let bytes: usize = name[name.len() - 1][1..].parse::<usize>().expect("a type has bits") / 8;
        let is_load = name[0] == "ld";
        let (address, values) = if is_load { (&operands[1], &operands[0]) } else { (&operands[0], &operands[1]) };
        let values = match values {
            Operand::Several(values) => values.clone(),
            one => vec![one.clone()],
        };
        let is_shared = name.iter().any(|part| part == "shared");
        let start = match address {
            Operand::Parameter(place) => *place,
            address => self.place(address, unit, is_shared, bytes * values.len()),
        };
        for (at, value) in values.iter().enumerate() {
            let range = start + at * bytes..start + (at + 1) * bytes;
            let number = if is_load { 0 } else { self.get(value, unit) };
            let held = match address {
                Operand::Parameter(_) => &mut self.parameters[range].to_vec()[..],
                _ if is_shared => &mut self.shared[range],
                _ => &mut self.memory[range],
            };
            if is_load {
                let number = held.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
                self.set(value, unit, number);
            } else {
                held.copy_from_slice(&number.to_le_bytes()[..bytes]);
            }
        }
    }

    fn start_copy(&mut self, operands: &[Operand], unit: usize) {
        let bytes = self.get(&operands[2], unit) as usize;
        let (to, from) = (self.place(&operands[0], unit, true, bytes), self.place(&operands[1], unit, false, bytes));
        self.shared[to..to + bytes].fill(0xff);
        self.copies.push((unit, from, to, bytes, self.get(&operands[3], unit) as usize));
    }

    fn finish_copies(&mut self, units: &[usize]) {
        let (done, left) = std::mem::take(&mut self.copies).into_iter().partition(|copy| units.contains(&copy.0));
        self.copies = left;
        for (_, from, to, bytes, copied) in done {
            self.shared[to..to + bytes].fill(0);
            self.shared[to..to + copied].copy_from_slice(&self.memory[from..from + copied]);
        }
    }

    /// `ldmatrix`: unit u gives the address of row u mod 8 of matrix u / 8, and gets two neighbours of row u / 4, or of
    /// column u / 4 if turned.
    fn load_matrices(&mut self, operands: &[Operand], plane: usize, turned: bool) {
        let Operand::Several(results) = &operands[0] else { panic!("it has several results") };
        let rows: Vec<usize> = (plane..plane + PLANE).map(|unit| self.place(&operands[1], unit, true, 16)).collect();
        for (matrix, result) in results.iter().enumerate() {
            for lane in 0..PLANE {
                let half = |which: usize| {
                    let (high, wide) = (lane / 4, lane % 4 * 2 + which);
                    let (row, column) = if turned { (wide, high) } else { (high, wide) };
                    let at = rows[matrix * 8 + row] + column * 2;
                    u64::from(u16::from_le_bytes([self.shared[at], self.shared[at + 1]]))
                };
                let both = half(0) | half(1) << 16;
                self.set(result, plane + lane, both);
            }
        }
    }

    /// `mma.m16n8k16` of bf16 into fp32, fragments as in the PTX ISA's section of that name.
    fn multiply(&mut self, operands: &[Operand], plane: usize) {
        let parts = |operand: &Operand| match operand {
            Operand::Several(parts) => parts.clone(),
            _ => panic!("a fragment has parts"),
        };
        let [d, a, b, c] = [0, 1, 2, 3].map(|operand| parts(&operands[operand]));
        let (mut left, mut right) = ([[0.0; 16]; 16], [[0.0; 8]; 16]);
        let mut sums = [[0.0_f64; 8]; 16];
        for lane in 0..PLANE {
            let (group, pair) = (lane / 4, lane % 4 * 2);
            let half = |part: &Operand, which: usize| {
                let both = self.get(part, plane + lane) as u32;
                f64::from(widened((both >> (16 * which)) as u16))
            };
            for which in 0..2 {
                for (part, operand) in a.iter().enumerate() {
                    left[group + part % 2 * 8][pair + part / 2 * 8 + which] = half(operand, which);
                }
                for (part, operand) in b.iter().enumerate() {
                    right[pair + part * 8 + which][group] = half(operand, which);
                }
            }
            for (part, operand) in c.iter().enumerate() {
                sums[group + part / 2 * 8][pair + part % 2] = f64::from(self.number(operand, plane + lane));
            }
        }
        for (row, sums) in sums.iter_mut().enumerate() {
            for (column, sum) in sums.iter_mut().enumerate() {
                *sum += (0..16).map(|k| left[row][k] * right[k][column]).sum::<f64>();
            }
        }
        for lane in 0..PLANE {
            for (part, operand) in d.iter().enumerate() {
                let sum = sums[lane / 4 + part / 2 * 8][lane % 4 * 2 + part % 2] as f32;
                self.set(operand, plane + lane, u64::from(sum.to_bits()));
            }
        }
    }

    /// `shfl.bfly`.
    fn exchange(&mut self, operands: &[Operand], plane: usize) {
        let mask = self.get(&operands[2], plane) as usize;
        let numbers: Vec<u64> = (plane..plane + PLANE).map(|unit| self.get(&operands[1], unit)).collect();
        (0..PLANE).for_each(|lane| self.set(&operands[0], plane + lane, numbers[lane ^ mask]));
    }

    /// The result of an instruction of one unit.
    fn compute(&self, instruction: &Instruction, unit: usize) -> u64 {
        let Instruction { name, operands, .. } = instruction;
        let kind = name[name.len() - 1].as_str();
        let int = |at: usize| truncated(self.get(&operands[at], unit), kind);
        let has = |part: &str| name.iter().any(|it| it == part);
        let float = |at: usize| self.number(&operands[at], unit);
        let single = |number: f32| u64::from(number.to_bits());
        match (name[0].as_str(), kind) {
            ("mov" | "cvta", _) => self.get(&operands[1], unit),
            ("setp", _) => u64::from(self.compares(&name[1], kind, operands, unit)),
            ("selp", _) => {
                let which = if self.get(&operands[3], unit) != 0 { 1 } else { 2 };
                self.get(&operands[which], unit)
            }
            ("cvt", _) => self.convert(&name[name.len() - 2], kind, operands, unit),
            ("add", "f32") => single(float(1) + float(2)),
            ("sub", "f32") => single(float(1) - float(2)),
            ("mul", "f32") => single(float(1) * float(2)),
            ("fma", "f32") => single(float(1).mul_add(float(2), float(3))),
            ("max", "f32") => single(float(1).max(float(2))),
            ("neg", "f32") => single(-float(1)),
            ("rcp", "f32") => single(1.0 / float(1)),
            ("ex2", "f32") => single(float(1).exp2()),
            ("lg2", "f32") => single(float(1).log2()),
            ("mul" | "mad", _) if has("wide") => {
                let product = int(1).wrapping_mul(int(2));
                product.wrapping_add(if name[0] == "mad" { self.get(&operands[3], unit) } else { 0 })
            }
            ("mul" | "mad", _) => {
                let product = int(1).wrapping_mul(int(2));
                truncated(product.wrapping_add(if name[0] == "mad" { int(3) } else { 0 }), kind)
            }
            ("add", _) => truncated(int(1).wrapping_add(int(2)), kind),
            ("sub", _) => truncated(int(1).wrapping_sub(int(2)), kind),
            ("div", "u32") => int(1) / int(2),
            ("rem", "u32") => int(1) % int(2),
            ("min", "u32") => int(1).min(int(2)),
            ("max", "u32") => int(1).max(int(2)),
            ("and", _) => int(1) & int(2),
            ("or", _) => int(1) | int(2),
            ("xor", _) => int(1) ^ int(2),
            ("not", "pred") => u64::from(int(1) == 0),
            ("shl", _) => truncated(int(1) << int(2), kind),
            ("shr", "u32" | "b32" | "u64" | "b64") => int(1) >> int(2),
            ("bfi", _) => {
                let mask = ((1_u64 << int(4)) - 1) << int(3);
                (int(1) << int(3)) & mask | int(2) & !mask
            }
            _ => panic!("{} is not among the instructions of kernels here", name.join(".")),
        }
    }

    fn compares(&self, how: &str, kind: &str, operands: &[Operand], unit: usize) -> bool {
        let order = match kind {
            "f32" => self.number(&operands[1], unit).partial_cmp(&self.number(&operands[2], unit)),
            _ => {
                let [a, b] = [1, 2].map(|at| truncated(self.get(&operands[at], unit), kind));
                // Signed numbers are ordered with their sign's bit turned.
                let turned = |number: u64| if kind == "s32" { number ^ (1 << 31) } else { number };
                Some(turned(a).cmp(&turned(b)))
            }
        };
        match how {
            "lt" => order.is_some_and(|it| it.is_lt()),
            "le" => order.is_some_and(|it| it.is_le()),
            "gt" => order.is_some_and(|it| it.is_gt()),
            "ge" => order.is_some_and(|it| it.is_ge()),
            "eq" => order.is_some_and(|it| it.is_eq()),
            "ne" => order.is_some_and(|it| it.is_ne()),
            _ => panic!("an unknown comparison: {how}"),
        }
    }

    fn convert(&self, to: &str, from: &str, operands: &[Operand], unit: usize) -> u64 {
        let number = truncated(self.get(&operands[1], unit), from);
        let brain = |number: f32| u64::from(rounded(number));
        match (to, from) {
            ("bf16x2", _) => brain(self.number(&operands[1], unit)) << 16 | brain(self.number(&operands[2], unit)),
            ("f32", "u32") => u64::from((number as u32 as f32).to_bits()),
            ("f32", "s32") => u64::from((number as u32 as i32 as f32).to_bits()),
            ("u16" | "u32" | "u64", "u16" | "u32" | "u64") => truncated(number, to),
            _ => panic!("an unknown conversion: {from} to {to}"),
        }
    }
}

/// A number of bf16.
pub fn widened(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The nearest number of bf16, of two the even one.
pub fn rounded(number: f32) -> u16 {
    let bits = number.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// The lowest bits, as many as a type has.
fn truncated(number: u64, kind: &str) -> u64 {
    match kind {
        "u16" | "s16" | "b16" => number & 0xffff,
        "u32" | "s32" | "b32" => number & 0xffff_ffff,
        _ => number,
    }
}
