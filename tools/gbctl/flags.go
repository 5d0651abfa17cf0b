package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// choice is a flag whose value is one of several words.
type choice struct {
	to *string
	of []string
}

func (c choice) String() string { return *c.to }
func (c choice) Type() string   { return "string" }

func (c choice) Set(value string) error {
	if !slices.Contains(c.of, value) {
		return fmt.Errorf("must be one of %s", strings.Join(c.of, ", "))
	}
	*c.to = value
	return nil
}

// choiceFlag adds a flag whose value is one of several words, the first of them by default.
func choiceFlag(cmd *cobra.Command, to *string, name, short, usage string, of ...string) {
	*to = of[0]
	cmd.Flags().VarP(choice{to, of}, name, short, usage)
	must(cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(of, cobra.ShellCompDirectiveNoFileComp)))
}

// patience is a flag that makes a command wait. Its value is how long at most, and may be left out.
type patience struct {
	to    *time.Duration // 0: the command doesn't wait
	usual time.Duration
}

func (p patience) Type() string { return "duration" }

func (p patience) String() string {
	if *p.to == 0 {
		return ""
	}
	return p.to.String()
}

// Set also takes true and false, which were the values of the flag before.
func (p patience) Set(value string) (err error) {
	former := map[string]string{"true": p.usual.String(), "false": "0"}
	*p.to, err = time.ParseDuration(cmp.Or(former[value], value))
	return err
}

// outputFile is the name of flags for a file to write: -o is for formats.
const outputFile = "output-file"

// formerName is the annotation of a flag that has got another name: the new name.
const formerName = "garboard-former-name"

// renamed keeps the former name of a flag for a release: hidden, and gbctl says what its name is now.
func renamed(cmd *cobra.Command, former, short, name string) {
	f := *cmd.Flags().Lookup(name)
	f.Name, f.Shorthand, f.Hidden, f.Annotations = former, short, true, map[string][]string{formerName: {name}}
	cmd.Flags().AddFlag(&f)
}

// formerNames accepts the former names of flags.
func (a *app) formerNames(cmd *cobra.Command) {
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if name := f.Annotations[formerName]; name != nil {
			cmd.Flags().Lookup(name[0]).Changed = true
			fmt.Fprintf(a.err, "note: the flag %s is called --%s here now; the former name goes with the next release\n", f.Name, name[0])
		}
	})
}
