package main

import (
	"cmp"
	"context"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/api/client"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
)

func (a *app) configCommand() *cobra.Command {
	cmd := group("config")
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
	config, err := loadClient(path)
	if errors.Is(err, fs.ErrNotExist) {
		return &client.Config{}, path, nil
	}
	return config, path, err
}

// changeContexts reads the client configuration, and saves what a function makes of it.
func (a *app) changeContexts(change func(*client.Config) error) error {
	config, path, err := a.load()
	if err != nil {
		return err
	}
	if err := change(config); err != nil {
		return err
	}
	return config.Save(path)
}

func (a *app) contextsCommand() *cobra.Command {
	return a.outputFlag(command("contexts", func(*cobra.Command, []string) error {
		config, path, err := a.load()
		if err != nil {
			return err
		}
		if len(config.Contexts) == 0 {
			return exitf(codeDenied, "no contexts in %s: 'gbctl gen config' makes the file of a cluster, 'gbctl config merge FILE' adds it", path)
		}
		var rows [][]string
		var documents []*yaml.Node
		for _, name := range slices.Sorted(maps.Keys(config.Contexts)) {
			c, current := config.Contexts[name], ""
			if name == cmp.Or(a.contextName, config.Context) {
				current = "*"
			}
			who, until := owner(c)
			rows = append(rows, []string{current, name, strings.Join(c.Endpoints, ","), strings.Join(c.Nodes, ","), who, until})
			documents = append(documents, mapping("name", name, "current", current != "", "endpoints", sequence(c.Endpoints), "nodes", sequence(c.Nodes), "as", who, "until", until))
		}
		return a.showTable(documents, false, []string{"CURRENT", "NAME", "ENDPOINTS", "NODES", "AS", "UNTIL"}, rows, true)
	}))
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
	cmd := command("use-context NAME", func(_ *cobra.Command, args []string) error {
		return a.changeContexts(func(config *client.Config) error {
			config.Context = args[0]
			_, err := a.context(config, args[0])
			return err
		})
	})
	cmd.ValidArgsFunction = a.completeContexts
	return cmd
}

// hostsCommand shows or sets one of the lists of a context.
func (a *app) hostsCommand(name string, of func(*client.Context) *[]string) *cobra.Command {
	return a.outputFlag(command(name+" [HOST…]", func(_ *cobra.Command, args []string) error {
		config, path, err := a.load()
		if err != nil {
			return err
		}
		c, err := a.context(config, a.contextName)
		if err != nil {
			return err
		}
		if len(args) == 0 {
			return a.showLines(name, *of(c))
		}
		var hosts []string
		for _, host := range strings.FieldsFunc(strings.Join(args, ","), func(r rune) bool { return r == ',' || r == ' ' }) {
			if _, _, err := client.Address(host); err != nil {
				return usagef("%w", err)
			}
			hosts = append(hosts, host)
		}
		*of(c) = hosts
		return config.Save(path)
	}))
}

func (a *app) mergeCommand() *cobra.Command {
	return command("merge FILE", func(_ *cobra.Command, args []string) error {
		other, err := loadClient(args[0])
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
	})
}

func (a *app) addCommand() *cobra.Command {
	var ca, crt, key string
	cmd := command("add NAME", func(_ *cobra.Command, args []string) error {
		return a.changeContexts(func(config *client.Config) error {
			if config.Contexts == nil {
				config.Contexts = map[string]*client.Context{}
			}
			c := cmp.Or(config.Contexts[args[0]], &client.Context{})
			config.Contexts[args[0]] = c
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
			config.Context = cmp.Or(config.Context, args[0])
			return usable(c) // report unusable files now, not with the next command
		})
	})
	cmd.Flags().StringVar(&ca, "ca", "", "file with the CA certificate of the machine API")
	cmd.Flags().StringVar(&crt, "crt", "", "file with your certificate")
	cmd.Flags().StringVar(&key, "key", "", "file with your private key")
	return cmd
}

// usable reports why nodes don't accept the certificate of a context.
func usable(c *client.Context) error {
	roots, pair, err := c.Credentials()
	if err != nil {
		return err
	}
	if _, err = pair.Leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		err = &exitError{codeDenied, fmt.Errorf("nothing was added: crt, which is valid from %s to %s, isn't a certificate of ca: %w; make a new one: %s",
			stamp(pair.Leaf.NotBefore), stamp(pair.Leaf.NotAfter), err, renewal)}
	}
	return err
}

// completionTime limits a completion that asks nodes: it must not seem to hang because a node is down.
const completionTime = 2 * time.Second

// completing completes the first argument of a command with words of the nodes, and the second one with given words.
func completing[M any](a *app, ask question[M], words func(M) []string, second ...string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) (found []string, _ cobra.ShellCompDirective) {
		if len(args) == 1 {
			return second, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), completionTime)
		defer cancel()
		answers, _ := gather(ctx, a, ask)
		for _, n := range answers {
			found = append(found, words(n.value)...)
		}
		slices.Sort(found)
		return slices.Compact(found), cobra.ShellCompDirectiveNoFileComp
	}
}

// Completion of contexts and nodes reads only local files.

func (a *app) completeContexts(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	config, _, err := a.load()
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

// Kinds of files that are easily mistaken for each other.
const (
	machineFile = "machine configuration"
	clientFile  = "client configuration"
)

// wrongKind is an error if a file is of another kind than a command takes.
func wrongKind(path string, text []byte, want string) error {
	var top map[string]any
	if yaml.Unmarshal(text, &top) != nil {
		return nil // who reads it has a better error
	}
	_, contexts := top["contexts"].(map[string]any)
	kind, use := "", ""
	switch {
	case top["kind"] == "Config" && top["clusters"] != nil:
		kind, use = "kubeconfig", "export KUBECONFIG="+shellWord(path)
	case top["apiVersion"] != nil && top["kind"] != nil:
		kind, use = "manifest of Kubernetes", "kubectl apply -f "+shellWord(path)
	case contexts:
		kind, use = clientFile, commandLine("config", "merge", path)
	case top["machine"] != nil || top["cluster"] != nil:
		kind, use = machineFile, "export GARBOARDCONFIG="+shellWord(filepath.Join(filepath.Dir(path), "garboardconfig"))
	}
	if kind == "" || kind == want {
		return nil
	}
	return usagef("%s is a %s, not a %s; did you mean '%s'?", path, kind, want, use)
}

// loadClient reads a client configuration.
func loadClient(path string) (*client.Config, error) {
	if text, err := os.ReadFile(path); err == nil {
		if err := wrongKind(path, text, clientFile); err != nil {
			return nil, err
		}
	}
	return client.Load(path)
}
