package cgroup

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const (
	hybrid = `27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
37 31 0:34 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:4 master:2 - cgroup2 cgroup2 rw
`
	unified = `22 27 0:21 / /proc rw,relatime - proc proc rw
31 23 0:28 / /sys/fs/cgroup rw,nosuid,nodev - cgroup2 cgroup2 rw,nsdelegate
90 60 0:28 /docker/abc /var/lib/x/sys/fs/cgroup rw - cgroup2 cgroup2 rw
`
)

func TestHierarchiesAreFound(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, mountinfo string
		want            []Hierarchy
		file            string
	}{
		{"v1 and v2", hybrid, []Hierarchy{
			{Mount: "/sys/fs/cgroup/cpu,cpuacct", Controllers: []string{"rw", "cpu", "cpuacct"}},
			{Mount: "/sys/fs/cgroup/freezer", Controllers: []string{"rw", "freezer"}},
			{Mount: "/sys/fs/cgroup/unified", Unified: true},
		}, "/sys/fs/cgroup/freezer/garboard/c/n/freezer.state FROZEN"},
		{"v2", unified, []Hierarchy{{Mount: "/sys/fs/cgroup", Unified: true}}, "/sys/fs/cgroup/garboard/c/n/cgroup.freeze 1"},
		{"v2 over v1", hybrid + unified, []Hierarchy{{Mount: "/sys/fs/cgroup", Unified: true}}, "/sys/fs/cgroup/garboard/c/n/cgroup.freeze 1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, err := parse(strings.NewReader(tc.mountinfo))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("hierarchies (-want +got):\n%s", diff)
			}
			file, value, err := freezer(got, "/garboard/c/n", true)
			if err != nil || file+" "+value != tc.file {
				t.Errorf("freezer: %s %s, %v; want %s", file, value, err, tc.file)
			}
		})
	}
}

func TestNoHierarchyIsAnError(t *testing.T) {
	t.Parallel()
	if _, _, err := freezer(nil, "/x", true); err == nil {
		t.Error("freezing without a cgroup hierarchy worked")
	}
}

func TestLimitsAreWrittenWhereTheControllerIs(t *testing.T) {
	t.Parallel()
	v1, err := parse(strings.NewReader(hybrid + "33 31 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"))
	if err != nil {
		t.Fatal(err)
	}
	v2, err := parse(strings.NewReader(unified))
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name string
		in   []Hierarchy
		l    Limits
		want []file
	}{
		{"v1", v1, Limits{CPUs: 3, MemoryMiB: 2048}, []file{
			{"/sys/fs/cgroup/cpu,cpuacct/garboard/c/n/cpu.cfs_period_us", "100000"},
			{"/sys/fs/cgroup/cpu,cpuacct/garboard/c/n/cpu.cfs_quota_us", "300000"},
			{"/sys/fs/cgroup/memory/garboard/c/n/memory.limit_in_bytes", "2147483648"},
		}},
		{"v2", v2, Limits{CPUs: 3, MemoryMiB: 2048}, []file{
			{"/sys/fs/cgroup/garboard/c/n/cpu.max", "300000 100000"},
			{"/sys/fs/cgroup/garboard/c/n/memory.max", "2147483648"},
		}},
		{"none", nil, Limits{}, nil},
	} {
		got, err := tc.l.files(tc.in, "/garboard/c/n")
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(file{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tc.name, diff)
		}
	}
	if _, err := (Limits{CPUs: 1}).files(nil, "/x"); err == nil {
		t.Error("limiting without a cgroup hierarchy worked")
	}
}
