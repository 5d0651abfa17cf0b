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
	cmd := group(&cobra.Command{
		Use:   "config",
		Short: "Manage applied configurations, and the client configuration",
		Long: `Manage the configurations of nodes (confirm, history, show, rollback), and the client
configuration: the clusters and how to reach them.`,
	})
	cmd.AddGroup(
		&cobra.Group{ID: "node", Title: "Configurations of nodes:"},
		&cobra.Group{ID: "client", Title: "The client configuration:"},
	)
	for _, c := range []*cobra.Command{a.confirmCommand(), a.historyCommand(), a.showCommand(), a.rollbackCommand()} {
		c.GroupID = "node"
		cmd.AddCommand(c)
	}
	for _, c := range []*cobra.Command{
		a.contextsCommand(), a.useContextCommand(), a.mergeCommand(), a.addCommand(),
		a.hostsCommand("nodes", "the nodes that commands use without -n", func(c *client.Context) *[]string { return &c.Nodes }),
		a.hostsCommand("endpoints", "the control planes that commands use if no nodes are set", func(c *client.Context) *[]string { return &c.Endpoints }),
	} {
		c.GroupID = "client"
		cmd.AddCommand(c)
	}
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
		Use:     "contexts",
		Short:   "List the contexts, which are the known clusters",
		Example: `  gbctl config contexts`,
		Args:    cobra.NoArgs,
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
		Short:             "Choose the context that commands use",
		Example:           `  gbctl config use-context home`,
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
func (a *app) hostsCommand(name, what string, of func(*client.Context) *[]string) *cobra.Command {
	return &cobra.Command{
		Use:   name + " [HOST…]",
		Short: "Show or set " + what,
		Example: fmt.Sprintf(`  gbctl config %[1]s                        show them
  gbctl config %[1]s 10.5.0.2 10.5.0.3      set them
  gbctl config %[1]s ''                     remove all`, name),
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
		Use:   "merge FILE",
		Short: "Add the contexts of another file",
		Long: `Add the contexts of another file to the client configuration, and make the current
context of that file the current one. If a name is in use by a different context, the
new one gets a number as suffix.`,
		Example: `  gbctl config merge garboardconfig`,
		Args:    cobra.ExactArgs(1),
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
		Use:   "add NAME",
		Short: "Add a context from files with certificates and a key",
		Example: `  gbctl config add home --ca ca.crt --crt admin.crt --key admin.key -e cluster.example.org
  gbctl config add home --crt admin.crt            replace the certificate`,
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
