package firewall

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
)

const (
	// policiesID is the only object of PolicyStatuses.
	policiesID = "policies"
	// agentTable is what kube-network-policies makes as soon as it knows all policies.
	agentTable = "kube-network-policies"
	// policiesEvery is how old the status may be. An agent keeps its table for the time of a boot.
	policiesEvery = time.Minute
	noEffect      = "NetworkPolicies have no effect on this node: "
)

// PolicyStatus is whether the node enforces NetworkPolicies.
type PolicyStatus struct {
	Enforced bool   `yaml:"enforced" column:"ENFORCED"`
	Problem  string `yaml:"problem,omitempty" column:"PROBLEM"`
}

// PolicyStatuses has one object while the configuration asks for NetworkPolicies.
var PolicyStatuses = resource.Define[PolicyStatus](resource.Definition{
	Type: "NetworkPolicyStatuses.net.garboard.dev", Kind: "NetworkPolicyStatus", Aliases: []string{"policies"}, Namespace: "network",
})

// policies looks whether the kernel and the agent do what cluster.network.policies asks for.
type policies struct {
	queue func() error         // whether the kernel has what the agent needs
	agent func() (bool, error) // whether it has its rules in the kernel
}

// PolicyController tells of NetworkPolicies that have no effect.
func PolicyController() resource.Controller {
	return (&policies{queue: tryQueue, agent: hasAgent}).controller()
}

func (p *policies) controller() resource.Controller {
	return resource.Controller{
		Name: "network.PolicyController", Reconcile: p.reconcile, Outputs: []string{PolicyStatuses.Type()},
		Inputs: []resource.Input{{Type: configuration.Configs.Type(), ID: configuration.ConfigID}},
	}
}

func (p *policies) reconcile(_ context.Context, v resource.View) (time.Duration, error) {
	cfg, err := configuration.Config(v)
	if err != nil {
		return 0, resource.IgnoreNotFound(err)
	}
	if !cfg.Cluster.Network.Policies {
		return 0, PolicyStatuses.Replace(v, nil)
	}
	var s PolicyStatus
	if s.Problem = p.unable(cfg); s.Problem != "" {
		// The agent can't do better.
	} else if s.Enforced, err = p.agent(); err != nil {
		s.Problem = fmt.Sprintf("it isn't known whether NetworkPolicies have an effect on this node: read the kernel's rules: %v", err)
	} else if !s.Enforced {
		s.Problem = noEffect + "kube-network-policies hasn't made its rules yet; see the node's pod of that name in kube-system"
	}
	return policiesEvery, PolicyStatuses.Replace(v, map[string]PolicyStatus{policiesID: s})
}

// Unable is what this node can't do of a configuration; "": nothing is known.
func Unable(c *config.Config) string { return (&policies{queue: tryQueue}).unable(c) }

func (p *policies) unable(c *config.Config) string {
	if !c.Cluster.Network.Policies {
		return ""
	}
	if err := p.queue(); err != nil {
		return fmt.Sprintf("%sits kernel can't queue packets for a program (nft_queue): %v", noEffect, err)
	}
	return ""
}

// tryQueue makes a rule that queues, in a chain that no packet passes, and removes it in the same transaction.
func tryQueue() error {
	c := dial()
	t := c.AddTable(&nftables.Table{Name: "garboard-try", Family: nftables.TableFamilyINet})
	chain := c.AddChain(&nftables.Chain{Name: "queue", Table: t})
	c.AddRule(&nftables.Rule{Table: t, Chain: chain, Exprs: []expr.Any{&expr.Queue{}}})
	c.DelTable(t)
	return firstError(c.Flush())
}

func hasAgent() (bool, error) {
	all, err := dial().ListTablesOfFamily(nftables.TableFamilyINet)
	return slices.ContainsFunc(all, func(t *nftables.Table) bool { return t.Name == agentTable }), err
}
