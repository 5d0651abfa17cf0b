package firewall

import (
	"os"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
)

// The kernel is asked as kube-network-policies asks it, and has nothing of it afterwards.
func TestPoliciesInTheKernel(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes rules in a network namespace")
	}
	s := newSpace(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var can, agents error
	must(s.in(func() error {
		can = tryQueue()
		c := dial()
		table := c.AddTable(&nftables.Table{Name: "agents", Family: nftables.TableFamilyINet})
		hook := &nftables.Chain{Name: "postrouting", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityFilter}
		c.AddRule(&nftables.Rule{Table: table, Chain: c.AddChain(hook), Exprs: []expr.Any{&expr.Queue{Num: 100}}})
		agents = c.Flush()
		return nil
	}))
	if (can == nil) != (agents == nil) {
		t.Errorf("tried: %v; the agent gets: %v", can, agents)
	}
	t.Logf("this kernel's answer: %v", can)
	must(s.in(func() error {
		there, err := hasAgent()
		if there {
			t.Error("there is an agent before there is one")
		}
		if err != nil {
			t.Fatal(err)
		}
		c := dial()
		all, err := c.ListTables()
		if err != nil {
			return err
		}
		for _, table := range all {
			if table.Name != "agents" {
				t.Errorf("table %s is left", table.Name)
			}
		}
		c.AddTable(&nftables.Table{Name: agentTable, Family: nftables.TableFamilyINet})
		if err := c.Flush(); err != nil {
			return err
		}
		if there, err = hasAgent(); !there {
			t.Error("the agent's table isn't found")
		}
		return err
	}))
}
