package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/garboard-os/garboard/image/program"
	"github.com/spf13/cobra"
)

func outdatedCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "outdated",
		Short: "List the Go modules that have newer versions: the node's, and those of its components",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			root, err := prepared(cmd.Context(), cmd.OutOrStdout(), false)
			if err != nil {
				return err
			}
			files, err := filepath.Glob(filepath.Join(root, "image", "components", "*", "go.mod"))
			out := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 3, ' ', 0)
			fmt.Fprintln(out, "WHERE\tMODULE\tVERSION\tNEWEST")
			for _, file := range append([]string{filepath.Join(root, "go.mod")}, files...) {
				where, _ := filepath.Rel(root, filepath.Dir(file))
				err = errors.Join(err, outdated(cmd.Context(), out, where, filepath.Dir(file)))
			}
			return errors.Join(err, out.Flush())
		},
	}
}

// outdated lists what a module requires itself, and its tools.
func outdated(ctx context.Context, out io.Writer, where, dir string) error {
	list := func(into any, args ...string) error {
		text, err := program.Output(ctx, dir, nil, "go", args...)
		if err != nil {
			return err
		}
		return json.Unmarshal([]byte(text), into)
	}
	var module struct {
		Require []struct {
			Path     string
			Indirect bool
		}
		Tool    []struct{ Path string }
		Replace []struct{ Old struct{ Path string } }
	}
	if err := list(&module, "mod", "edit", "-json"); err != nil {
		return err
	}
	fixed := map[string]bool{} // those of Kubernetes' own repository have its version
	for _, r := range module.Replace {
		fixed[r.Old.Path] = true
	}
	for _, r := range module.Require {
		isTool := slices.ContainsFunc(module.Tool, func(t struct{ Path string }) bool { return strings.HasPrefix(t.Path+"/", r.Path+"/") })
		if r.Indirect && !isTool || fixed[r.Path] {
			continue
		}
		var found struct {
			Version string
			Update  *struct{ Version string }
		}
		if err := list(&found, "list", "-m", "-u", "-json", r.Path); err != nil {
			fmt.Fprintf(out, "%s\t%s\t\tunknown: %v\n", where, r.Path, err)
		} else if found.Update != nil {
			fmt.Fprintf(out, "%s\t%s\t%s\t%s\n", where, r.Path, found.Version, found.Update.Version)
		}
	}
	return nil
}
