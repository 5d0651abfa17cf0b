package main

import (
	"cmp"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/api/client"
	"github.com/spf13/cobra"
)

func (a *app) configCommand() *cobra.Command {
	cmd := group(&cobra.Command{Use: "config"})
	cmd.AddGroup(
		&cobra.Group{ID: "node", Title: "Configurations of nodes:"},
		&cobra.Group{ID: "client", Title: "The client configuration:"},
	)
	addTo(cmd, "node", a.confirmCommand(), a.historyCommand(), a.showCommand(), a.rollbackCommand())
	addTo(cmd, "client",
		a.contextsCommand(), a.useContextCommand(), a.mergeCommand(), a.addCommand(), a.renewCommand(),
		a.hostsCommand("nodes", func(c *client.Context) *[]string { return &c.Nodes }),
		a.hostsCommand("endpoints", func(c *client.Context) *[]string { return &c.Endpoints }))
	return cmd
}

// load reads the client configuration. If the file doesn't exist, the configuration is
// empty.
func (a *app) load() (*client.Config, string, error) {
	path, err := a.path()
	if err != nil {
		return nil, "", err
	}
	config, err := client.Load(path)
	if errors.Is(err, fs.ErrNotExist) {
		return &client.Config{}, path, nil
	}
	return config, path, err
}

func (a *app) contextsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "contexts",
		RunE: func(*cobra.Command, []string) error {
			config, path, err := a.load()
			if err != nil {
				return err
			}
			if len(config.Contexts) == 0 {
				fmt.Fprintf(a.err, "no contexts in %s: 'gbctl gen config' makes the file of a cluster, 'gbctl config merge FILE' adds it\n", path)
				return nil
			}
			var rows [][]string
			for _, name := range slices.Sorted(maps.Keys(config.Contexts)) {
				c, current := config.Contexts[name], ""
				if name == cmp.Or(a.contextName, config.Context) {
					current = "*"
				}
				who, until := owner(c)
				rows = append(rows, []string{current, name, strings.Join(c.Endpoints, ","), strings.Join(c.Nodes, ","), who, until})
			}
			return table(a.out, []string{"CURRENT", "NAME", "ENDPOINTS", "NODES", "AS", "UNTIL"}, rows)
		},
	}
}

// owner returns the identity in the certificate of a context, and its expiry date.
func owner(c *client.Context) (who, until string) {
	_, pair, err := c.Credentials()
	if err != nil {
		return "(" + err.Error() + ")", ""
	}
	subject := pair.Leaf.Subject
	return fmt.Sprintf("%s (%s)", subject.CommonName, strings.Join(subject.Organization, ", ")), pair.Leaf.NotAfter.UTC().Format("2006-01-02")
}

func (a *app) useContextCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "use-context NAME",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeContexts,
		RunE: func(_ *cobra.Command, args []string) error {
			config, path, err := a.load()
			if err != nil {
				return err
			}
			if _, err := config.Current(args[0]); err != nil {
				return err
			}
			config.Context = args[0]
			return config.Save(path)
		},
	}
}

// hostsCommand shows or sets one of the lists of a context.
func (a *app) hostsCommand(name string, of func(*client.Context) *[]string) *cobra.Command {
	return &cobra.Command{
		Use:  name + " [HOST…]",
		Args: cobra.ArbitraryArgs,
		RunE: func(_ *cobra.Command, args []string) error {
			config, path, err := a.load()
			if err != nil {
				return err
			}
			c, err := config.Current(a.contextName)
			if err != nil {
				return err
			}
			if len(args) == 0 {
				for _, host := range *of(c) {
					fmt.Fprintln(a.out, host)
				}
				return nil
			}
			var hosts []string
			for _, arg := range args {
				for host := range strings.SplitSeq(arg, ",") {
					if host = strings.TrimSpace(host); host == "" {
						continue
					}
					if _, _, err := client.Address(host); err != nil {
						return usagef("%w", err)
					}
					hosts = append(hosts, host)
				}
			}
			*of(c) = hosts
			return config.Save(path)
		},
	}
}

func (a *app) mergeCommand() *cobra.Command {
	return &cobra.Command{
		Use:  "merge FILE",
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			other, err := client.Load(args[0])
			if err != nil {
				return err
			}
			config, path, err := a.load()
			if err != nil {
				return err
			}
			renamed := config.Merge(other)
			if err := config.Save(path); err != nil {
				return err
			}
			for _, from := range slices.Sorted(maps.Keys(renamed)) {
				fmt.Fprintf(a.out, "context %q was added as %q\n", from, renamed[from])
			}
			fmt.Fprintf(a.out, "merged into %s; the current context is %q\n", path, config.Context)
			return nil
		},
	}
}

func (a *app) addCommand() *cobra.Command {
	var ca, crt, key string
	cmd := &cobra.Command{
		Use:  "add NAME",
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			config, path, err := a.load()
			if err != nil {
				return err
			}
			if config.Contexts == nil {
				config.Contexts = map[string]*client.Context{}
			}
			c := config.Contexts[args[0]]
			if c == nil {
				c = &client.Context{}
				config.Contexts[args[0]] = c
			}
			for _, part := range []struct {
				file string
				to   *string
			}{{ca, &c.CA}, {crt, &c.Crt}, {key, &c.Key}} {
				if part.file == "" {
					continue
				}
				data, err := os.ReadFile(part.file)
				if err != nil {
					return err
				}
				*part.to = base64.StdEncoding.EncodeToString(data)
			}
			if len(a.endpoints) > 0 {
				c.Endpoints = a.endpoints
			}
			if len(a.nodes) > 0 {
				c.Nodes = a.nodes
			}
			// Report unusable files now, not with the next command.
			if _, _, err := c.Credentials(); err != nil {
				return err
			}
			if config.Context == "" {
				config.Context = args[0]
			}
			return config.Save(path)
		},
	}
	cmd.Flags().StringVar(&ca, "ca", "", "file with the CA certificate of the machine API")
	cmd.Flags().StringVar(&crt, "crt", "", "file with your certificate")
	cmd.Flags().StringVar(&key, "key", "", "file with your private key")
	return cmd
}

// Completion reads only local files: it must not hang because a node is down.

func (a *app) completeContexts(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	path, err := a.path()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	config, err := client.Load(path)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return slices.Sorted(maps.Keys(config.Contexts)), cobra.ShellCompDirectiveNoFileComp
}

func (a *app) completeNodes(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	c, err := a.access()
	if err != nil || c == nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return slices.Concat(c.Nodes, c.Endpoints), cobra.ShellCompDirectiveNoFileComp
}
