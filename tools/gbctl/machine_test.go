package main

import (
	"testing"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
)

func TestCommandOfAProcess(t *testing.T) {
	t.Parallel()
	for want, p := range map[string]*apiv1.Process{
		"/usr/bin/etcd --name=a":                     {Args: "/usr/bin/etcd --name=a", Executable: "/usr/bin/etcd", Command: "etcd"},
		"/coredns":                                   {Executable: "/coredns", Command: "coredns"},
		"/usr/local/bin/kube-controller-manager":     {Executable: "/usr/local/bin/kube-controller-manager", Command: "kube-controller"},
		"/usr/local/bin/kubernetes (kube-scheduler)": {Executable: "/usr/local/bin/kubernetes", Command: "kube-scheduler"},
		"kworker/0:0":                                {Command: "kworker/0:0"},
	} {
		if got := commandOf(p); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
