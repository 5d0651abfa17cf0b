package main

import (
	"cmp"
	_ "embed"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// habits are words of people who know other programs. A key is a word, behind the words of its command.
type habits struct {
	Commands   map[string]string // what to type instead, with the same arguments
	Kubernetes []string          // what is for kubectl
	Sentences  map[string]string // what to use instead of what doesn't exist
	Flags      map[string]string // what to type instead of a flag; empty: nothing
	Arguments  map[string]string // of a command that takes none or fewer: the flag, or the command, that takes one
}

//go:embed habits.yaml
var habitTexts []byte

func readHabits() (h habits) {
	must(yaml.Unmarshal(habitTexts, &h))
	return h
}

// habit is the error of a word that means something in other programs.
func (a *app) habit(cmd *cobra.Command, what, word string) error {
	key, h := strings.TrimPrefix(cmd.CommandPath()+" "+word, "gbctl "), readHabits()
	switch right, sentence := h.Commands[key], h.Sentences[key]; {
	case right != "":
		return didYouMean(what, a.moved(cmd, word, strings.Fields(right)))
	case sentence != "":
		return usagef("%s: %s", what, sentence)
	case slices.Contains(h.Kubernetes, key):
		return usagef("%s: that is for Kubernetes: 'gbctl kubeconfig' once, then 'kubectl %s'", what, key)
	}
	return nil
}

var plainWord = regexp.MustCompile(`^[\w@%+=:,./~-]+$`)

// shellWord is a word of a command line as a shell reads it.
func shellWord(word string) string {
	if plainWord.MatchString(word) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

func commandLine(words ...string) string {
	line := "gbctl"
	for _, word := range words {
		line += " " + shellWord(word)
	}
	return line
}

// didYouMean is the error of a command line, with the one that was probably meant.
func didYouMean(what string, words []string) error {
	return usagef("%s; did you mean '%s'?", what, commandLine(words...))
}

// instead is what was typed, with other words in the place of one, which may be the value of a flag.
func (a *app) instead(wrong string, right ...string) []string {
	at := slices.IndexFunc(a.args, func(s string) bool { return s == wrong || strings.HasPrefix(s, "-") && strings.HasSuffix(s, wrong) })
	if at < 0 {
		return append(slices.Clone(a.args), right...)
	}
	if len(right) == 1 {
		right = []string{strings.TrimSuffix(a.args[at], wrong) + right[0]}
	}
	return slices.Concat(a.args[:at], right, a.args[at+1:])
}

// fits reports whether a command takes the flags and the arguments of a line, of which one may be missing.
func fits(root *cobra.Command, line []string) bool {
	cmd, rest, err := root.Find(line)
	if err != nil || cmd.ParseFlags(rest) != nil {
		return false
	}
	args, accepts := cmd.Flags().Args(), argumentsOf(cmd)
	return len(args) == 0 || accepts(cmd, args) == nil || accepts(cmd, append(args, "")) == nil
}

// moved is what was typed, with the path of another command in front, and without the words of both. What that command
// doesn't take is left out.
func (a *app) moved(cmd *cobra.Command, wrong string, path []string) []string {
	rest := slices.Clone(a.args)
	for _, word := range slices.Concat(strings.Fields(cmd.CommandPath())[1:], []string{wrong}, path) {
		if at := slices.Index(rest, word); at >= 0 {
			rest = slices.Delete(rest, at, at+1)
		}
	}
	if line := slices.Concat(path, rest); fits(cmd.Root(), line) {
		return line
	}
	return path
}

// closest adds the command line that was probably meant to the error of an unknown word, if one of the known words is
// similar.
func (a *app) closest(err error, word string, known []string) error {
	if best := config.Closest(word, known); best != "" {
		what, _, _ := strings.Cut(err.Error(), "; the")
		return didYouMean(what, a.instead(word, best))
	}
	return err
}

// misspelt is closest for the message of a node about something that it doesn't have.
func (a *app) misspelt(message string) string {
	what, known, _ := strings.Cut(message, "; there are ")
	known, _, _ = strings.Cut(known, ";")
	for _, word := range a.args {
		if strings.Contains(what, strconv.Quote(word)) && known != "" {
			return a.closest(errors.New(message), word, strings.Split(known, ", ")).Error()
		}
	}
	return message
}

// explainUsage makes a command and its subcommands say what to type instead of wrong arguments.
func (a *app) explainUsage(cmd *cobra.Command) {
	accepts := cmd.Args
	cmd.Args = func(cmd *cobra.Command, words []string) error {
		if accepts(cmd, words) == nil {
			return nil
		}
		return a.wrongWords(cmd, words)
	}
	for _, c := range cmd.Commands() {
		a.explainUsage(c)
	}
}

// The ends of a command's usage: optional can be left out, and options has flags only.
var (
	optional = regexp.MustCompile(` (\[|-).*`)
	options  = regexp.MustCompile(` (\| )?-.*`)
)

// argumentsOf accepts as many arguments as the usage of a command names.
func argumentsOf(cmd *cobra.Command) cobra.PositionalArgs {
	usage := strings.TrimPrefix(cmd.Use, cmd.Name())
	least := len(strings.Fields(optional.ReplaceAllString(usage, "")))
	if strings.Contains(usage, "...") || strings.Contains(usage, "…") {
		return cobra.MinimumNArgs(least)
	}
	return cobra.RangeArgs(least, len(strings.Fields(options.ReplaceAllString(usage, ""))))
}

// wrongWords is the error of a command whose arguments are too many or too few.
func (a *app) wrongWords(cmd *cobra.Command, words []string) error {
	usage := strings.TrimPrefix(cmd.Use, cmd.Name())
	required := strings.Fields(optional.ReplaceAllString(usage, ""))
	if len(words) < len(required) {
		return usagef("%s is missing: type '%s'%s", strings.Join(required[len(words):], " and "), cmd.CommandPath()+usage, example(cmd, "gbctl"))
	}
	if err := a.oneDash(cmd); err != nil {
		return err
	}
	extra := words[min(len(words)-1, len(strings.Fields(usage)))]
	_, notAddress := netip.ParseAddr(extra)
	_, notDuration := time.ParseDuration(extra)
	switch wait := cmd.Flags().Lookup("wait"); {
	case len(cmd.ValidArgs) > 0 && len(words) == 1:
		return a.closest(usagef("%q must be one of %s", extra, strings.Join(cmd.ValidArgs, ", ")), extra, cmd.ValidArgs)
	case notAddress == nil:
		return didYouMean(fmt.Sprintf("%q is the address of a node", extra), a.instead(extra, "-n", extra))
	case notDuration == nil && wait != nil && wait.Changed:
		return didYouMean(fmt.Sprintf("%q is no argument", extra), slices.DeleteFunc(a.instead("--wait", "--wait="+extra), func(s string) bool { return s == extra }))
	case cmd.HasSubCommands():
		return a.unknownCommand(cmd, words)
	case slices.Contains([]string{"get", "list", "ls", "show", "status"}, extra):
		return didYouMean(fmt.Sprintf("%q isn't needed", extra), a.instead(extra))
	}
	what := fmt.Sprintf("%q is one argument too many", extra)
	switch right := readHabits().Arguments[pathOf(cmd)]; {
	case strings.HasPrefix(right, "-"):
		return didYouMean(what, a.instead(extra, right, extra))
	case right != "":
		return didYouMean(what, a.moved(cmd, cmd.CalledAs(), strings.Fields(right)))
	}
	return usagef("%s: type '%s'", what, cmd.CommandPath()+usage)
}

// oneDash is the error of a long flag with one dash, which is short flags.
func (a *app) oneDash(cmd *cobra.Command) error {
	for _, word := range a.args {
		name, _, _ := strings.Cut(word, "=")
		if len(name) < 3 || name[0] != '-' || name[1] == '-' {
			continue
		}
		right := "-" + name
		if cmd.Flags().Lookup(name[1:]) == nil {
			right = readHabits().Flags[right]
		}
		if long, _, _ := strings.Cut(right, "="); strings.HasPrefix(long, "--") && cmd.Flags().Lookup(long[2:]) != nil {
			return didYouMean(fmt.Sprintf("%s: a flag of several letters has two dashes", name), a.instead(word, right+strings.TrimPrefix(word, name)))
		}
	}
	return nil
}

// missingFlags says what to type for flags that a command can't do without.
func missingFlags(cmd *cobra.Command) error {
	err := cmd.ValidateRequiredFlags()
	if text := example(cmd, "gbctl"); err != nil && text != "" {
		return usagef("%w%s", err, text)
	}
	return err
}

// example is an example of the help that has a text in it, for the end of an error.
func example(cmd *cobra.Command, has string) string {
	for line := range strings.Lines(cmd.Example) {
		line, _, _ = strings.Cut(strings.TrimSpace(line), "   ") // it explains the example
		if strings.Contains(line, has) && !strings.HasSuffix(line, `\`) {
			return fmt.Sprintf(", such as '%s'", line)
		}
	}
	return ""
}

// unknownCommand is the error of words of which the first is no subcommand of a command.
func (a *app) unknownCommand(cmd *cobra.Command, words []string) error {
	what := fmt.Sprintf("unknown command %q for %q", words[0], cmd.CommandPath())
	if err := a.habit(cmd, what, words[0]); err != nil {
		return err
	}
	known := !cmd.HasParent() && len(elsewhere(cmd, words[0])) > 0
	if inner, _, err := cmd.Find(words[1:]); err == nil && inner != cmd && !known { // etcd get members, docker ps
		return didYouMean(what, a.instead(words[0]))
	}
	if paths := elsewhere(cmd.Root(), words[0]); len(paths) == 1 {
		return didYouMean(what, a.moved(cmd, words[0], strings.Fields(paths[0])))
	}
	cmd.SuggestionsMinimumDistance = 2 // as cobra's own
	similar := cmd.SuggestionsFor(words[0])
	for _, c := range cmd.Commands() {
		if len(cmd.Commands()) == 1 || len(c.Name()) > 3 && strings.HasPrefix(words[0], c.Name()) {
			similar = append(similar, c.Name())
		}
	}
	if best := config.Closest(words[0], similar); best != "" || len(similar) == 1 {
		if line := a.instead(words[0], cmp.Or(best, similar[0])); fits(cmd.Root(), line) {
			return didYouMean(what, line)
		}
	}
	return usagef("%s\n'%s --help' lists the commands", what, cmd.CommandPath())
}

// elsewhere returns the commands with a name, in all groups of commands.
func elsewhere(in *cobra.Command, name string) (paths []string) {
	for _, c := range in.Commands() {
		if c.Name() == name && c.IsAvailableCommand() {
			paths = append(paths, pathOf(c))
		}
		paths = append(paths, elsewhere(c, name)...)
	}
	return paths
}

// flagError explains a flag that doesn't exist, lacks its value, or has a wrong one.
func (a *app) flagError(cmd *cobra.Command, err error) error {
	if wrong := a.oneDash(cmd); wrong != nil {
		return wrong
	}
	if unknown, ok := errors.AsType[*pflag.NotExistError](err); ok {
		cmd.FParseErrWhitelist.UnknownFlags = true
		if group := strings.Fields(cmd.CommandPath())[1:]; cmd.HasSubCommands() && cmd.ParseFlags(a.args) == nil && cmd.Flags().NArg() > len(group) {
			if wrong := cmd.ValidateArgs(cmd.Flags().Args()[len(group):]); wrong != nil { // exec -it POD
				return wrong
			}
		}
		return a.unknownFlag(cmd, unknown)
	}
	if lacking, ok := errors.AsType[*pflag.ValueRequiredError](err); ok {
		f := lacking.GetFlag()
		return usagef("--%s needs a value: %s%s", f.Name, f.Usage, cmp.Or(example(cmd, " --"+f.Name+" "), example(cmd, " -"+cmp.Or(f.Shorthand, f.Name)+" ")))
	}
	if invalid, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		f, value := invalid.GetFlag(), invalid.GetValue()
		if c, ok := f.Value.(choice); ok {
			return a.closest(err, value, c.of)
		}
		if _, notNumber := strconv.Atoi(value); notNumber == nil && f.Value.Type() == "duration" {
			return didYouMean(err.Error(), a.instead(value, value+"s"))
		}
		return usagef("%w: %s", err, f.Usage)
	}
	return err
}

func (a *app) unknownFlag(cmd *cobra.Command, unknown *pflag.NotExistError) error {
	typed := "--" + unknown.GetSpecifiedName()
	if short := unknown.GetSpecifiedShortnames(); short != "" {
		typed = "-" + short
	}
	what, known := "unknown flag: "+typed, []string{}
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			known = append(known, "--"+f.Name)
		}
	})
	habit, ok := readHabits().Flags[typed]
	name, _, _ := strings.Cut(habit, "=")
	right := habit
	if !slices.Contains(known, name) && (habit == "" || habit[0] == '-') {
		long := "--" + strings.TrimLeft(typed, "-")
		begun := slices.DeleteFunc(slices.Clone(known), func(f string) bool { return !strings.HasPrefix(f, long) && !strings.HasPrefix(long, f+"-") })
		if best := config.Closest(typed, known); best != "" {
			right, name = best, best
		} else if len(begun) == 1 {
			right, name = begun[0], begun[0]
		}
	}
	at := slices.IndexFunc(a.args, func(s string) bool { return s == typed || strings.HasPrefix(s, typed+"=") })
	bundle := slices.IndexFunc(a.args, func(s string) bool { return len(s) > 2 && s[1] != '-' && "-"+s[len(s)-1:] == typed })
	switch {
	case bundle >= 0 && ok && right == "": // ls -la
		return didYouMean(what, a.instead(a.args[bundle], strings.TrimSuffix(a.args[bundle], typed[1:])))
	case at >= 0 && slices.Contains(known, name):
		return didYouMean(what, a.instead(a.args[at], right+strings.TrimPrefix(a.args[at], typed)))
	case habit != "" && !strings.HasPrefix(habit, "-"):
		return usagef("%s: %s", what, habit)
	case at >= 0 && ok && right == "":
		return didYouMean(what, a.instead(a.args[at]))
	}
	return usagef("%s\n'%s --help' lists the flags", what, cmd.CommandPath())
}
