package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
)

const (
	rotateCA = "rotate-ca" // the operation
	// dropQuestion is its question before the old credentials end, in the step before dropStep.
	dropQuestion = "drop"
	dropStep     = "drop"
	// formerSuffix is for the name of the context with the former credentials, which are valid
	// again if the rotation is undone.
	formerSuffix = "-former"
)

func (a *app) rotateCACommand() *cobra.Command {
	r := &apiv1.RotateCARequest{}
	var yes bool
	chosen := map[string]*bool{}
	cmd := command("rotate-ca", func(cmd *cobra.Command, _ []string) error {
		for name, yes := range chosen {
			if *yes {
				r.Authorities = append(r.Authorities, name)
			}
		}
		slices.Sort(r.Authorities)
		a.raiseTimeout(cmd, planTimeout)
		return a.untimed(cmd.Context(), "rotate-ca", func(ctx context.Context, c *client.Client) error { return a.rotate(ctx, c, r, yes) })
	})
	f := cmd.Flags()
	for name, what := range map[string]string{
		config.MachineAuthority: "the authority of the machine API", config.KubernetesAuthority: "the authority of Kubernetes", config.EtcdAuthority: "the authority of etcd",
		config.AggregatorAuthority: "the authority of aggregated APIs", config.ServiceAccountKey: "the key of service accounts",
		config.AtRestKey: "the key of Secrets in etcd, and encrypt them again", "join-tokens": "the tokens with which machines join",
	} {
		chosen[name] = f.Bool(name, false, "only "+what+", and others that are named")
	}
	f.BoolVarP(&yes, "yes", "y", false, "answer the question with yes, once this user has new credentials")
	f.BoolVar(&r.DryRun, "dry-run", false, "only check the cluster, and show the steps")
	return cmd
}

// rotate starts the operation, or follows one that runs, and keeps the credentials of this
// user valid.
func (a *app) rotate(ctx context.Context, c *client.Client, r *apiv1.RotateCARequest, yes bool) error {
	o, err := a.started(ctx, c, r.DryRun, a.unlessRunning(rotateCA, r.DryRun, starting(operationAPI.RotateCA, r)))
	if o == nil {
		return err
	}
	f := a.follower(c.Name, o.Id, func(*apiv1.Operation) bool { return false })
	f.command = rotateCA
	f.prepare = func(ctx context.Context, o *apiv1.Operation) (answer string, err error) {
		if o.Question.GetId() != dropQuestion {
			return "", nil
		}
		if err := a.withClient(ctx, c.Name, a.renewAll); err != nil {
			return "", fmt.Errorf("get new credentials: %w", err)
		}
		if yes {
			return "yes", nil
		}
		return "", nil
	}
	err = f.run(ctx)
	switch {
	case f.last == nil || f.last.Ended == nil:
		return err
	case err == nil:
		return a.withClient(ctx, c.Name, a.renewAll) // with the new authorities only
	case stepIs(f.last, dropStep, apiv1.OperationStep_STATE_PENDING):
		if rerr := a.restoreFormer(); rerr != nil {
			fmt.Fprintf(a.err, "%s: %s\n", c.Name, visible(rerr.Error()))
		}
	}
	return err
}

// renewAll renews the context, and the entries of the cluster in the kubeconfig.
func (a *app) renewAll(ctx context.Context, c *client.Client) error {
	ctx, done := a.request(ctx, c.Name)
	defer done()
	if err := a.renew(ctx, c); err != nil {
		return err
	}
	return a.renewKubeconfig(ctx, c)
}

func (a *app) renewCommand() *cobra.Command {
	return command("renew", func(cmd *cobra.Command, _ []string) error {
		return a.one(cmd.Context(), "config renew", a.renew)
	})
}

// renew replaces the certificate of the context by a new one, for a new key, and its
// authorities by all that the node accepts. While there are several, the former credentials
// stay in a context of their own.
func (a *app) renew(ctx context.Context, c *client.Client) error {
	file, path, err := a.load()
	if err != nil {
		return err
	}
	name := cmp.Or(a.contextName, file.Context)
	old, err := file.Current(name)
	if err != nil {
		return err
	}
	key, err := pki.NewKey(pki.Ed25519)
	if err != nil {
		return err
	}
	request, err := pki.NewRequest(key, pki.Leaf{})
	if err != nil {
		return err
	}
	m, err := client.Unary(ctx, c.Access.ClientCertificate, &apiv1.ClientCertificateRequest{Request: request})
	if err != nil {
		return err
	}
	b64, next := base64.StdEncoding.EncodeToString, *old
	next.CA, next.Crt, next.Key = b64(m.GetAuthorities()), b64(m.GetCertificate()), b64(key)
	if err := works(ctx, &next, c.Name); err != nil {
		return fmt.Errorf("the new certificate doesn't work, and context %q stays as it is: %w", name, err)
	}
	file.Contexts[name] = &next
	if bytes.Count(m.GetAuthorities(), []byte("-----BEGIN ")) < 2 {
		delete(file.Contexts, name+formerSuffix)
	} else if file.Contexts[name+formerSuffix] == nil {
		file.Contexts[name+formerSuffix] = old
	}
	if err := file.Save(path); err != nil {
		return err
	}
	a.loaded = &next
	_, until := owner(&next)
	fmt.Fprintf(a.out, "context %q has a new certificate, valid until %s\n", name, until)
	return nil
}

// works tries a context.
func works(ctx context.Context, c *client.Context, node string) error {
	n, err := client.Dial(c, node)
	if err != nil {
		return err
	}
	defer n.Close()
	_, err = client.Unary(ctx, n.Node.Version, &apiv1.VersionRequest{})
	return err
}

// restoreFormer makes the former credentials those of the context again.
func (a *app) restoreFormer() error {
	return a.changeContexts(func(file *client.Config) error {
		name := cmp.Or(a.contextName, file.Context)
		if former := file.Contexts[name+formerSuffix]; former != nil {
			file.Contexts[name] = former
			delete(file.Contexts, name+formerSuffix)
		}
		return nil
	})
}

// renewKubeconfig replaces the entries of the cluster in the user's kubeconfig, if there are
// any. The current context stays.
func (a *app) renewKubeconfig(ctx context.Context, c *client.Client) error {
	m, err := client.Unary(ctx, c.Access.Kubeconfig, &apiv1.KubeconfigRequest{})
	if err != nil {
		return err
	}
	if _, err := checkKubeconfig(m.Kubeconfig, nil); err != nil {
		return fmt.Errorf("the node's kubeconfig: %w; nothing was changed", err)
	}
	path, err := defaultKubeconfig()
	if err != nil {
		return err
	}
	entries := merging{via: a.loaded.Via, renew: true}
	if err := entries.into(path, m.Kubeconfig); errors.Is(err, errNotThere) {
		return nil
	} else if err != nil {
		return err
	}
	fmt.Fprintf(a.out, "the entries of the cluster in %s are renewed\n", path)
	return nil
}
