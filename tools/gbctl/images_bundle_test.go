package main

import (
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
)

// S-125
func TestImagesList(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		which imageList
		want  string // part of the list
		count int
	}{
		{imageList{purpose: forCluster}, config.DefaultEtcdImage, 9},
		{imageList{purpose: forInstall}, "ghcr.io/garboard-os/installer:", 1},
		{imageList{purpose: forUpgrade, to: "1.35.4"}, "registry.k8s.io/kube-proxy:v1.35.4", 5},
	} {
		got, err := tc.which.images(&app{}, nil)
		if err != nil || len(got) != tc.count || !strings.Contains(strings.Join(got, "\n"), tc.want) {
			t.Errorf("%+v: %q, %v", tc.which, got, err)
		}
	}
	for _, bad := range []imageList{{purpose: "fun"}, {purpose: forUpgrade, to: "1.2.3"}, {purpose: forCluster, to: "1.35.4"}, {purpose: forInstall, configs: []string{"/nowhere"}}} {
		if _, err := bad.images(&app{}, nil); err == nil {
			t.Errorf("%+v: no error", bad)
		}
	}
	if got, err := (&imageList{purpose: forCluster}).images(&app{}, []string{"a:1", "b:1", "a:1"}); err != nil || len(got) != 2 {
		t.Errorf("%q, %v", got, err)
	}
}
